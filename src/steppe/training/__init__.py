"""One run: config, loop, evaluation, checkpoints."""

from steppe.errors import Interrupted, RunError

from .config import RunConfig, apply_overrides, configure, make_config, read_config
from .directory import RunDirectory, select, validation_accuracy
from .draws import draw_hparams
from .evaluation import EnsembleScores
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
    "load_model",
    "make_config",
    "read_config",
    "select",
    "train",
    "validation_accuracy",
]
