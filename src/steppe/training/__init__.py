"""One run: config, loop, evaluation, checkpoints."""

from steppe.errors import Interrupted, RunError

from .complete import apply_overrides, configure, make_config
from .config import RunConfig, read_config
from .curvature import measure_run
from .directory import RunDirectory, select, validation_accuracy
from .draws import draw_hparams
from .evaluation import EnsembleScores
from .measured import Measured, load_measurements
from .models import (
    TrainedModel,
    evaluate_ensemble,
    evaluate_run,
    export_run,
    load_model,
)
from .run import train

__all__ = [
    "EnsembleScores",
    "Interrupted",
    "Measured",
    "RunConfig",
    "RunDirectory",
    "RunError",
    "TrainedModel",
    "apply_overrides",
    "configure",
    "draw_hparams",
    "evaluate_ensemble",
    "evaluate_run",
    "export_run",
    "load_measurements",
    "load_model",
    "make_config",
    "measure_run",
    "read_config",
    "select",
    "train",
    "validation_accuracy",
]
