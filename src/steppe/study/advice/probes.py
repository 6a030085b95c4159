"""Short runs that an advisor learns from: each source domain is left out in turn.

No image of the held-out target is read. A few optimizers run with a few learning rates, of which
source validation chooses one. Still shorter runs give the weights at which the loss is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from steppe.domains import dataset_spec, import_plugins
from steppe.errors import RunError, UserError, unknown
from steppe.reports import load_runs
from steppe.reports.selection import mean_of
from steppe.study.runs import on_all_images
from steppe.sweeps import Grid, Job, Sweep, jobs
from steppe.sweeps.growing import diverged

from .extent import BASELINE, FULL, PROBED, Extent

FEWEST = 3
"""Source domains."""
WARM_UP = 0.0
FIRST_SEED = 2000
"""The first trial seed: neither tuning nor claims of a study use it."""


class Probe(NamedTuple):
    """The place of a run."""

    optimizer: str
    left_out: str
    seed: int
    factor: float
    """Its learning rate, relative to the default; `WARM_UP` for a warm-up."""


class Result(NamedTuple):
    """Accuracies of a short run in percent; None if it diverged."""

    validation: float | None
    left_out: float | None


def sources(dataset: str, target: str | None) -> tuple[str, ...]:
    """The domains to train on: all but the target, if there is one."""
    spec = dataset_spec(dataset)
    domains = spec.domains
    if spec.n_classes < 2:
        raise UserError(f"{dataset} has one class: there is nothing to learn")
    if target is not None and target not in domains:
        raise UserError(unknown(f"target of {dataset}:", target, domains))
    found = tuple(domain for domain in domains if domain != target)
    if len(found) < FEWEST:
        besides = "" if target is None else f" besides {target}"
        raise UserError(
            f"{dataset} has {len(found)} domain{'s' * (len(found) != 1)}{besides}: advice needs at "
            f"least {FEWEST}, to leave one out and to compare the gradients of the others"
        )
    return found


def grids(
    dataset: str,
    target: str | None,
    extent: Extent = FULL,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> dict[Probe, Grid]:
    """Return the grid of every short run."""
    import_plugins((options or {}).get("plugins", ()))
    domains = sources(dataset, target)
    found = {}
    for left_out in domains[: extent.left_out]:
        rest = [domain for domain in domains if domain != left_out]
        short = partial(
            short_run,
            dataset,
            target=left_out,
            options={**(options or {}), "sources": rest},
            overrides=overrides,
            tag="" if target is None else f"-for-{target}",
        )
        for optimizer, seed, factor in product(PROBED, range(extent.seeds), extent.factors):
            found[Probe(optimizer, left_out, seed, factor)] = short(
                optimizer, seed=FIRST_SEED + seed, steps=extent.steps, factor=factor
            )
        found[Probe(BASELINE, left_out, 0, WARM_UP)] = short(
            BASELINE, seed=FIRST_SEED, steps=extent.warm_up
        )
    return found


def short_run(
    dataset: str,
    optimizer: str,
    target: str,
    seed: int,
    steps: int,
    factor: float = 1.0,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    tag: str = "",
) -> Grid:
    """Return the grid of one run, evaluated once, after its last update.

    Args:
        dataset: its name or folder.
        optimizer: its name.
        target: the domain to leave out.
        seed: the trial seed.
        steps: the number of updates.
        factor: the learning rate, relative to the default.
        options: other config keys, such as `sources`.
        overrides: ``key=value`` settings.
        tag: tells apart runs that differ in their sources alone.
    """
    grid = Grid(
        (dataset,),
        optimizers=(optimizer,),
        first_trial=seed,
        trials=1,
        draws=0,
        targets=target,
        options=options or {},
        overrides=(*overrides, f"steps={steps + 1}", f"checkpoint_every={steps}"),
        tag=f"{steps}-x{factor:.3g}{tag}",
    )
    if factor == 1:
        return grid
    ((_, config),) = jobs(grid)
    rate = f"optimizer.lr={config.optimizer.options['lr'] * factor:.4g}"
    return replace(grid, overrides=(*grid.overrides, rate))


def folders(sweep: Sweep, planned: Mapping[Probe, Grid]) -> dict[Probe, Path]:
    """The folder of every run that is done.

    Raises:
        RunError: a run failed without diverging.
    """
    names = {probe: next(jobs(grid))[0] for probe, grid in planned.items()}
    found = {probe: Job(sweep.folder(name)).result for probe, name in names.items()}
    missing = {probe: names[probe] for probe, path in found.items() if not path.exists()}
    failed = sorted(set(missing.values()) - set(diverged(sweep, missing.values())))
    if failed:
        last = Job(sweep.folder(failed[0])).last()
        why = "it has no result" if last is None else last.facts.get("error", "it has no result")
        raise RunError(f"{len(failed)} short runs failed, such as {failed[0]}: {why}")
    return {probe: path for probe, path in found.items() if probe not in missing}


def results(done: Mapping[Probe, Path], planned: Mapping[Probe, Grid]) -> dict[Probe, Result]:
    """The accuracies of all short runs, without the warm-ups."""
    wanted = {path: probe for probe, path in done.items() if probe.factor != WARM_UP}
    found = {probe: Result(None, None) for probe in planned if probe.factor != WARM_UP}
    for run in load_runs(list(wanted)).runs:
        probe, record = wanted[run.path], run.records[-1]
        known = [key for key in record.accuracy if key[0] != probe.left_out and key[1] == "val"]
        found[probe] = Result(
            _percent(mean_of(record, known)), _percent(on_all_images(run, record))
        )
    return found


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def tuned(found: Mapping[Probe, Result]) -> dict[str, float]:
    """For each optimizer, the learning rate with the best mean source validation."""
    best: dict[str, tuple[float, float]] = {}
    for optimizer, factor in dict.fromkeys((p.optimizer, p.factor) for p in found):
        ours = [r for p, r in found.items() if (p.optimizer, p.factor) == (optimizer, factor)]
        # A run that diverged learned nothing.
        reached = fmean(r.validation or 0.0 for r in ours)
        # Ties go to the default.
        best[optimizer] = max(best.get(optimizer, (-1.0, 1.0)), (reached, factor), key=_preferred)
    return {optimizer: factor for optimizer, (_, factor) in best.items()}


def _preferred(rate: tuple[float, float]) -> tuple[float, bool, float]:
    reached, factor = rate
    return reached, factor == 1.0, -factor


def columns(found: Mapping[Probe, Result]) -> Iterator[tuple[str, Result]]:
    """The paired results of each optimizer at its tuned rate, in the same order for all."""
    rates = tuned(found)
    for optimizer, factor in rates.items():
        chosen = [p for p in found if p.optimizer == optimizer and p.factor == factor]
        for probe in sorted(chosen, key=lambda p: (p.left_out, p.seed)):
            yield optimizer, found[probe]
