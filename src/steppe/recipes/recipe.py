"""What a recipe is: the runs behind a table or figure of the paper, and the scales to run it at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from steppe.errors import UserError, unknown


@dataclass(frozen=True)
class Part:
    """Runs of a recipe that have the same settings.

    Attributes:
        optimizers: names.
        tag: ends the names of its runs.
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


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper, as runs.

    Attributes:
        name: what `steppe reproduce` calls it.
        about: what it shows, in a line.
        label: of the table or figure in the paper's source; empty where the paper has none.
        datasets: the paper's.
        parts: its runs.
        tables: of the paper's numbers, to be shown beside ours; the first first.
        figure: how it is drawn, by the name in `figures.FIGURES`; empty: tables only.
        targets: what is held out: `single`, or names.
        tuned: whether learning rates are tuned first, at scales that do not draw.
        scaled: by a scale's name, what is different about it for this recipe.
        curvature: whether the final models' curvature is measured.
        timed: whether tables show times.
    """

    name: str
    about: str
    label: str
    datasets: tuple[str, ...]
    parts: tuple[Part, ...]
    tables: tuple[str, ...] = ()
    figure: str = ""
    targets: str = "single"
    tuned: bool = True
    scaled: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    curvature: bool = False
    timed: bool = False

    @property
    def optimizers(self) -> tuple[str, ...]:
        """All of them, in the paper's order."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.optimizers))

    def at(self, scale: str) -> Scale:
        """The scale, as it is for this recipe."""
        if scale not in SCALES:
            raise UserError(unknown("scale", scale, SCALES))
        return replace(SCALES[scale], **self.scaled.get(scale, {}))


@dataclass(frozen=True)
class Scale:
    """How much of a recipe is run.

    Attributes:
        name: `full`, `small` or `smoke`.
        about: in a line.
        share: of the paper's updates.
        trials: seeds.
        draws: of hyper-parameters; 0: none, learning rates are tuned instead.
        space: where defaults and draws come from; where learning rates are tuned, they start from
            those of the space `fair`.
        factors: learning rates that are tried, as multiples of the optimizer's own default.
        tuning: the share of a run's updates that a try takes.
        evaluations: of a run, at most, besides the first.
        optimizers: those of a recipe's that are run, where there are others; empty: all.
        datasets: stands for a recipe's datasets; empty: its own.
        only: how many targets of a dataset are held out in turn; None: all.
        options: keys of every run's config.
        curvature: options of the measurement.
    """

    name: str
    about: str
    share: float
    trials: int
    draws: int
    space: str
    factors: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    tuning: float = 0.3
    evaluations: int | None = None
    optimizers: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    only: int | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    curvature: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "full",
            "the paper's grid: its datasets, ResNet-50, 3 trials, 20 draws",
            share=1.0,
            trials=3,
            draws=20,
            space="fad",
        ),
        Scale(
            "small",
            "at most a GPU-hour on PACS: five optimizers, learning rates tuned, fewer updates",
            share=0.2,
            trials=3,
            draws=0,
            space="fad",
            evaluations=5,
            optimizers=("adam", "sgd", "sam", "gam", "fad"),
            datasets=("PACS",),
            curvature=MappingProxyType(
                {"top": 20, "images": 96, "batch_size": 96, "trace_rtol": 0.05, "tol": 0.01}
            ),
        ),
        Scale(
            "smoke",
            "whether it runs: built-in data, a few updates",
            share=0.0008,
            trials=1,
            draws=0,
            space="fad",
            factors=(),
            evaluations=2,
            datasets=("RotatedDigits", "Doodles"),
            only=1,
            options=MappingProxyType({"device": "cpu", "batch_size": 8, "workers": 0}),
            curvature=MappingProxyType({"top": 2, "images": 8, "trace_rtol": 9.0, "tol": 0.1}),
        ),
    )
}
"""By name."""
