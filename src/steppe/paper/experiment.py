"""Definition of an experiment: its runs, its presentation, and the scales it runs at."""

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
    """Runs of an experiment that share their settings.

    Attributes:
        optimizers: names of optimizers.
        tag: suffix of its runs' names, which distinguishes arms with the same axes.
        label: the setting that distinguishes it, for tables and figures. `Order.setting` adds the
            number of updates.
        value: the same setting as a number, for the axis of a figure.
        algorithms: names of algorithms.
        averaging: names of averaging methods.
        steps: number of updates in the paper (default: each dataset's own).
        overrides: ``key=value`` settings for its runs.
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
        """Whether its overrides set the learning rate."""
        return any(text.startswith(RATE) for text in self.overrides)


@dataclass(frozen=True)
class Scale:
    """How much of an experiment to run.

    Attributes:
        name: `full`, `small` or `smoke`.
        about: a one-line description.
        share: fraction of the paper's updates per run.
        trials: number of trial seeds.
        draws: hyperparameter samples per method; 0 tunes learning rates instead.
        space: search space of defaults and samples. Tuned learning rates always start from the
            defaults of the space `fair`.
        factors: learning rates to try, as multiples of the optimizer's default.
        tuning: length of a tuning run, as a fraction of a full run.
        evaluations: maximum number of evaluations per run, not counting the first.
        optimizers: subset of the experiment's optimizers (default: all).
        datasets: replacements for the experiment's datasets (default: none).
        only: number of targets per dataset (default: all).
        options: config keys for every run.
        curvature: options of the curvature measurement.
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
        "at most one GPU-hour on PACS: five optimizers, tuned learning rates, fewer updates",
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
        "a quick check that it runs: built-in data, a few updates",
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
    """The runs behind a table or figure of the paper.

    Attributes:
        name: its name in `steppe reproduce`.
        about: what it shows, in one line.
        datasets: the paper's datasets.
        arms: its runs.
        label: label of the table or figure in the paper's source; empty if the paper has none.
        tables: tables with the paper's numbers to show next to ours, in order of preference.
        figure: function that draws its results (default: tables only).
        columns: keys of additional table columns, from `tables.TIMES` and
            `steppe.reports.columns.COSTS`.
        note: additional note below its tables.
        targets: `single` for each domain in turn, or names of domains.
        tuned: whether to tune learning rates at scales without hyperparameter samples.
        scaled: changes to a scale for this experiment, by name of the scale.
        curvature: whether to measure the curvature of the final models.
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
        """All optimizers, in the paper's order."""
        return tuple(dict.fromkeys(name for arm in self.arms for name in arm.optimizers))

    def at(self, scale: str) -> Scale:
        """A scale with this experiment's changes."""
        return replace(SCALES[scale], **self.scaled.get(SCALES[scale].name, {}))


def _catalog() -> Iterable[Experiment]:
    from .catalog import CATALOG

    return CATALOG


EXPERIMENTS = Registry("experiment", _catalog)


def register_experiment(experiment: Experiment) -> Experiment:
    """Add an experiment to `steppe reproduce`."""
    return EXPERIMENTS.add(experiment)
