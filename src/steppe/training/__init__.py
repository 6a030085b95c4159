"""One run: config, loop, evaluation, checkpoints."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from steppe.errors import Interrupted as Interrupted, RunError as RunError

    from .complete import (
        apply_overrides as apply_overrides,
        configure as configure,
        make_config as make_config,
    )
    from .config import RunConfig as RunConfig, read_config as read_config
    from .directory import (
        RunDirectory as RunDirectory,
        select as select,
        validation_accuracy as validation_accuracy,
    )
    from .draws import draw_hparams as draw_hparams
    from .evaluation import EnsembleScores as EnsembleScores
    from .exports import export_run as export_run
    from .merge import Merged as Merged, merge_runs as merge_runs
    from .models import (
        TrainedModel as TrainedModel,
        evaluate_ensemble as evaluate_ensemble,
        evaluate_run as evaluate_run,
        load_model as load_model,
    )
    from .predict import (
        Prediction as Prediction,
        find_images as find_images,
        predict_images as predict_images,
    )
    from .recipes import Recipe as Recipe, register_recipe as register_recipe
    from .run import train as train
else:  # not for type checkers, which would take any name for one of the package
    __getattr__, __dir__, __all__ = attach(__name__)
