"""Advise: short runs on a dataset, its indicators, and what they say about each optimizer."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from steppe.errors import UserError
from steppe.optim import optimizer_spec
from steppe.reports import load_runs
from steppe.study.design import FIXED
from steppe.sweeps import Crew, Grid, Status, cost, jobs, run_sweep, write_plan
from steppe.sweeps.local import devices
from steppe.training.processes import find_device

from . import probes
from .extent import EXTENTS, FULL, PER_GPU, Extent
from .indicators import as_fitted
from .observing import observe, warm_ups
from .probes import WARM_UP, Probe
from .ranking import Forecast, fit
from .table import Example, Table, shipped

BUDGET = 240.0
"""Seconds."""
LEVEL = 0.8
"""Of the intervals."""
LEAST = 0.1
"""Points of expected gain below which a note says that the baseline will do."""
OVERHEAD = 0.15
"""Seconds that a run takes besides its updates and evaluations."""
SHARE = 0.8
"""Of the time that is left: estimates are rough, and the indicators take time, too."""

TOO_LONG = 2.0
"""Budgets that warm-up runs may take."""
SMALL = "--backbone small-cnn --weights none --image-size 32 --batch-size 16"

OWN = (*FIXED, "sources", "steps", "checkpoint_every", "optimizer.lr")
"""Config keys that the short runs set."""
TRUST = "on families of tasks that the model has not seen"
"""The fact of a table that says how good its advice is."""

Show = Callable[[str, int, int], None]
"""Receives the phase, and how many of its runs are done."""


@dataclass(frozen=True)
class Row:
    """What to expect of an optimizer.

    Attributes:
        optimizer: its name.
        probability: that its accuracy on the target is the highest.
        gain: expected accuracy minus the baseline's, in points.
        low: lower end of the gain's 80% interval.
        high: upper end of it.
        passes: forward and backward passes of a step.
        rate: the learning rate that its short runs chose, relative to the default; None if it had
            no short runs.
    """

    optimizer: str
    probability: float
    gain: float
    low: float
    high: float
    passes: float
    rate: float | None


@dataclass(frozen=True)
class Advice:
    """Which optimizer fits a dataset.

    Attributes:
        dataset: its name or folder.
        target: the held-out domain, of which no image was read; None if every domain is a source.
        ranking: the optimizers, from the highest expected accuracy down.
        indicators: the measured values.
        outside: indicators that are far from those of all tasks that the model was fitted to.
        baseline: the optimizer that gains are relative to.
        slope: the share of a lead in short runs that is expected to remain on the target.
        informed: whether other indicators change the ranking.
        extent: what was run.
        seconds: how long it took.
        facts: how the model was fitted, and how well it advises on tasks that it has not seen.
    """

    dataset: str
    target: str | None
    ranking: tuple[Row, ...]
    indicators: Mapping[str, float]
    outside: tuple[str, ...]
    baseline: str
    slope: float
    informed: bool
    extent: Extent
    seconds: float
    facts: Mapping[str, Any]

    def sentence(self) -> str:
        """The advice in words."""
        first = self.ranking[0]
        odds = f"{100 * first.probability:.0f}% likely to be the best of {len(self.ranking)}"
        if first.optimizer == self.baseline:
            return f"Take {first.optimizer}: {odds}."
        gain = f"{first.gain:+z.1f} points ({100 * LEVEL:.0f}% interval {first.low:+z.1f} to "
        return (
            f"Take {first.optimizer}: {odds}; expected gain over {self.baseline}: "
            f"{gain}{first.high:+z.1f})."
        )

    def notes(self) -> tuple[str, ...]:
        """What to keep in mind, in words."""
        found = []
        first = self.ranking[0]
        if first.optimizer != self.baseline and first.gain < LEAST:
            found.append(
                f"{first.optimizer} is expected to gain less than {LEAST:g} points, at "
                f"{first.passes:g} passes per step: {self.baseline} will do"
            )
        if self.slope and not self.informed:
            found.append(
                f"the ranking rests on the leads in short runs, of which {self.slope:.0%} are "
                "expected to remain; no other indicator improves it"
            )
        elif not self.informed:
            found.append(
                "no indicator predicts reliably which optimizer is best: this is the ranking on "
                "average over the fitted tasks, whatever the dataset"
            )
        if self.outside:
            found.append(
                f"{', '.join(self.outside)}: outside the range of the fitted tasks, so the ranking "
                "is an extrapolation"
            )
        if self.extent != FULL:
            found.append(
                f"the budget allows {self.extent}: the values are noisier than those that the "
                "model was fitted to; a larger --budget helps"
            )
        if TRUST in self.facts:
            found.append(f"{TRUST}: {self.facts[TRUST]}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {"advice": self.sentence(), "notes": self.notes(), **asdict(self)}


def advise(
    dataset: str,
    *,
    target: str | None = None,
    budget: float = BUDGET,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    crew: Crew | None = None,
    out: Path | None = None,
    table: Table | None = None,
    show: Show = lambda phase, done, total: None,
) -> Advice:
    """Rank optimizers for a dataset after minutes of short runs.

    The runs leave out each source domain in turn, so at least three are needed. They give the
    indicators; a model that was fitted to many small tasks gives the ranking. Its error is measured
    on small tasks only; fine-tuning a large pretrained network is an extrapolation.

    Args:
        dataset: a name, or a folder DOMAIN/CLASS/IMAGE.
        target: the domain that you will test on: none of its images is read (default: every
            domain is a source).
        budget: seconds; fewer and shorter runs are made if the full number would take longer.
        options: config keys of all runs, such as `backbone` or `root`.
        overrides: ``key=value`` settings of all runs.
        crew: the workers to start (default: one per core, or four on each GPU).
        out: where to keep the runs, which also resumes them (default: they are deleted).
        table: what to fit the model to (default: the table that comes with steppe).
        show: called with the progress.

    Examples:
        >>> advice = advise("RotatedDigits", target="75", budget=1.0)  # doctest: +SKIP
        >>> advice.ranking[0].optimizer, advice.indicators["disagreement"]  # doctest: +SKIP
        ('adamw', 0.68)
    """
    began = time.monotonic()
    if not budget > 0:
        raise UserError(f"budget must be more than 0 seconds, got {budget:g}")
    for text in (*(options or {}), *overrides):
        if (key := text.partition("=")[0].strip()).removesuffix(".name") in OWN:
            raise UserError(f"{text}: the short runs set {key} themselves, so leave it out")
    known = table or shipped()
    crew = crew or Crew(per_gpu=PER_GPU)
    plan = partial(probes.grids, dataset, target, options=options, overrides=overrides)
    with _folder(out) as folder:
        warm = {probe: grid for probe, grid in plan(FULL).items() if probe.factor == WARM_UP}
        check_time(warm.values(), budget, crew)
        # Two sweeps: resumed, the warm-ups do not wait for what is left of the short runs, and the
        # smallest extent's short runs are as long as a warm-up, so that names would repeat.
        first = _carried_out(warm, folder / "warm-up", crew, partial(show, "warm-up"))
        left = budget - (time.monotonic() - began)
        extent = fitting({e: plan(e) for e in EXTENTS}, warm_ups(first), left, crew)
        planned = plan(extent)
        short = {probe: grid for probe, grid in planned.items() if probe.factor != WARM_UP}
        second = _carried_out(short, folder / "short", crew, partial(show, "short runs"))
        done = {p: path for p, path in {**first, **second}.items() if p in planned}
        found = probes.results(done, planned)
        values = observe(done, found, "auto", partial(show, "indicators"))
    model = fit([fitted(example) for example in known.examples])
    forecast = model.predict(as_fitted(values))
    return Advice(
        dataset=dataset,
        target=target,
        ranking=ranked(forecast, probes.tuned(found)),
        indicators=values,
        outside=forecast.outside,
        baseline=forecast.baseline,
        slope=model.slope,
        informed=math.isfinite(model.strength),
        extent=extent,
        seconds=round(time.monotonic() - began, 1),
        facts=known.facts,
    )


def fitted(example: Example) -> Example:
    """An example with its indicators as the model takes them."""
    return replace(example, indicators=as_fitted(example.indicators))


def ranked(forecast: Forecast, rates: Mapping[str, float]) -> tuple[Row, ...]:
    """The rows of a forecast, from the highest expected accuracy down."""
    intervals = forecast.interval(LEVEL)
    rows = [
        Row(
            name,
            forecast.best[name],
            gain,
            *intervals[name],
            optimizer_spec(name).passes,
            rates.get(name),
        )
        for name, gain in forecast.mean.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.gain))


def check_time(warm: Collection[Grid], budget: float, crew: Crew) -> None:
    """Refuse a budget that the warm-up runs alone would exceed several times.

    Raises:
        UserError: with the estimate, and with smaller runs.
    """
    ((_, config),) = jobs(next(iter(warm)))
    spec, where = config.spec(), find_device("auto")
    images = config.batch_size * len(config.sources) * config.steps * len(warm)
    each = cost.seconds_per_image(config, spec.channels, where)
    seconds = each * images / len(devices(crew))
    if seconds > TOO_LONG * budget:
        raise UserError(
            f"the warm-up runs alone take an estimated {timedelta(seconds=round(seconds))} on this "
            f"machine, and the budget is {timedelta(seconds=round(budget))}: raise it with "
            f"--budget, or use small runs: {SMALL}"
        )


def fitting(
    plans: Mapping[Extent, Mapping[Probe, Grid]],
    warm: Iterable[Path],
    seconds: float,
    crew: Crew,
) -> Extent:
    """The largest extent whose runs take at most so many seconds; the smallest if none does.

    Args:
        plans: the runs of each extent, the largest first.
        warm: folders of warm-up runs, whose records tell the time of a step and of an evaluation.
        seconds: the time that is left.
        crew: the workers.
    """
    folders = list(warm)
    last = [run.records[-1] for run in (load_runs(folders).runs if folders else ())]
    step = min((r.seconds_per_step or 0.0 for r in last), default=0.0)
    evaluation = min((r.evaluation_seconds or 0.0 for r in last), default=0.0)
    workers = len(devices(crew))
    for extent, plan in plans.items():
        runs = [probe for probe in plan if probe.factor != WARM_UP]
        passes = sum(optimizer_spec(probe.optimizer).passes for probe in runs)
        updates = passes * extent.steps * step
        if len(runs) * (OVERHEAD + evaluation) + updates <= SHARE * seconds * workers:
            return extent
    return list(plans)[-1]


def _carried_out(
    planned: Mapping[Probe, Grid], folder: Path, crew: Crew, show: Callable[[int, int], None]
) -> dict[Probe, Path]:
    sweep = write_plan(list(planned.values()), folder, extend=True)

    def tell(status: Status) -> None:
        show(status.counts["done"] + status.counts["failed"], len(sweep.names))

    run_sweep(sweep, crew=crew, show=tell)
    return probes.folders(sweep, planned)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="steppe-advise-") as home:
        yield Path(home)
