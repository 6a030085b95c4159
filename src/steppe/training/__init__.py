"""One run: config, loop, evaluation, checkpoints."""

from typing import TYPE_CHECKING

from steppe.errors import Interrupted, RunError
from steppe.lazy import lazily

if TYPE_CHECKING:
    from .config import RunConfig, apply_overrides, configure, make_config, read_config
    from .directory import RunDirectory, select, validation_accuracy
    from .draws import draw_hparams
    from .evaluation import EnsembleScores
    from .models import TrainedModel, evaluate_ensemble, evaluate_run, export_run, load_model
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

__getattr__ = lazily(
    globals(),
    {
        "config": "RunConfig apply_overrides configure make_config read_config",
        "directory": "RunDirectory select validation_accuracy",
        "draws": "draw_hparams",
        "evaluation": "EnsembleScores",
        "models": "TrainedModel evaluate_ensemble evaluate_run export_run load_model",
        "run": "train",
    },
)
