"""What an experiment is: the runs behind a table or figure, how it is shown, and at what scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from steppe.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .results import Results

RATE = "optimizer.lr="


@dataclass(frozen=True)
class Arm:
    """Runs of an experiment that have the same settings.

    Attributes:
        optimizers: names.
        tag: ends the names of its runs, so that arms with the same axes differ.
        label: what is special about it, as tables and figures say it; of the number of updates,
            see `Order.setting`.
        value: the same as a number, for an axis.
        algorithms: names.
        averaging: names.
        steps: the paper's updates; None: those of each dataset.
        overrides: ``key=value`` texts for its runs.
    """

    optimizers: tuple[str, ...]
    tag: str = ""
    label: str = ""
    value: float | None = None
    algorithms: tuple[str, ...] = ("ERM",)
    averaging: tuple[str, ...] = ("none",)
    steps: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def has_rate(self) -> bool:
        """Whether it says its learning rate itself."""
        return any(text.startswith(RATE) for text in self.overrides)


@dataclass(frozen=True)
class Scale:
    """How much of an experiment is run.

    Attributes:
        name: `full`, `small` or `smoke`.
        about: in a line.
        share: fraction of the paper's number of updates.
        trials: number of trial seeds, which set the train/validation splits.
        draws: hyperparameter samples per method; 0 tunes the learning rates instead.
        space: where defaults and draws come from; where learning rates are tuned, they start from
            those of the space `fair`.
        factors: learning rates to try, as multiples of the optimizer's default.
        tuning: the share of a run's updates that a try takes.
        evaluations: of a run, at most, besides the first.
        optimizers: those of the experiment's that are run; empty: all.
        datasets: stand for the experiment's datasets; empty: its own.
        only: how many targets of a dataset are held out in turn; None: all.
        options: keys of every run's config.
        curvature: options of the measurement.
    """

    name: str
    about: str
    share: float
    trials: int
    draws: int
    space: str = "fad"
    factors: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    tuning: float = 0.3
    evaluations: int | None = None
    optimizers: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    only: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    curvature: Mapping[str, Any] = field(default_factory=dict)


_SCALES = (
    Scale(
        "full",
        "the paper's grid: its datasets, ResNet-50, 3 trials, 20 draws",
        share=1.0,
        trials=3,
        draws=20,
    ),
    Scale(
        "small",
        "at most a GPU-hour on PACS: five optimizers, learning rates tuned, fewer updates",
        share=0.2,
        trials=3,
        draws=0,
        evaluations=5,
        optimizers=("adam", "sgd", "sam", "gam", "fad"),
        datasets=("PACS",),
        curvature={"top": 20, "images": 96, "batch_size": 96, "trace_rtol": 0.05, "tol": 0.01},
    ),
    Scale(
        "smoke",
        "whether it runs: built-in data, a few updates",
        share=0.0008,
        trials=1,
        draws=0,
        factors=(),
        evaluations=2,
        datasets=("RotatedDigits", "Doodles"),
        only=1,
        options={"device": "cpu", "batch_size": 8, "workers": 0},
        curvature={"top": 2, "images": 8, "trace_rtol": 9.0, "tol": 0.1},
    ),
)
SCALES = Registry("scale", lambda: _SCALES)


@dataclass(frozen=True)
class Experiment:
    """A table or figure, as runs.

    Attributes:
        name: what `steppe reproduce` calls it.
        about: what it shows, in a line.
        datasets: the paper's.
        arms: its runs.
        label: of the table or figure in the paper's source; empty where the paper has none.
        tables: of the paper's numbers, to be shown beside ours; the first first.
        figure: draws it from its results; None: tables only.
        columns: what tables show beside accuracies, by the keys in `tables.TIMES` and
            `steppe.reports.columns.COSTS`.
        note: below its tables, besides what stands below all.
        targets: what is held out: `single`, or names.
        tuned: whether learning rates are tuned first, at scales that do not draw.
        scaled: by a scale's name, what is different about it for this experiment.
        curvature: whether the final models' curvature is measured.
    """

    name: str
    about: str
    datasets: tuple[str, ...]
    arms: tuple[Arm, ...]
    label: str = ""
    tables: tuple[str, ...] = ()
    figure: Callable[[Results], Figure] | None = None
    columns: tuple[str, ...] = ()
    note: str = ""
    targets: str = "single"
    tuned: bool = True
    scaled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    curvature: bool = False

    @property
    def optimizers(self) -> tuple[str, ...]:
        """All of them, in the paper's order."""
        return tuple(dict.fromkeys(name for arm in self.arms for name in arm.optimizers))

    def at(self, scale: str) -> Scale:
        """The scale, as it is for this experiment."""
        return replace(SCALES[scale], **self.scaled.get(SCALES[scale].name, {}))


def _catalog() -> Iterable[Experiment]:
    from .catalog import CATALOG

    return CATALOG


EXPERIMENTS = Registry("experiment", _catalog)


def register_experiment(experiment: Experiment) -> Experiment:
    """Make an experiment known to `steppe reproduce`."""
    return EXPERIMENTS.add(experiment)
