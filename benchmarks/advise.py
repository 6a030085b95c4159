"""What `steppe advise` is fitted to: small tasks, how far each optimizer gets, and indicators.

Every run leaves one domain out. On each task, each optimizer tries three learning rates on seeds of
their own, of which source validation chooses one. Then it runs with the other seeds. The indicators
are those that `steppe advise` measures. The sweeps resume after an interruption.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import OVERRIDES, Result, command, option, track
from runs import SweepOptions, refuse_own

from steppe.console import Meter, stderr
from steppe.domains import load
from steppe.environment import environment
from steppe.errors import UserError
from steppe.study.advice import probes
from steppe.study.advice.advising import TRUST, fitted
from steppe.study.advice.extent import BASELINE, FACTORS, FULL
from steppe.study.advice.observing import Values, observe
from steppe.study.advice.probes import Probe, short_run
from steppe.study.advice.ranking import FEWEST
from steppe.study.advice.regret import evaluate, transferred
from steppe.study.advice.strategies import strategies
from steppe.study.advice.table import Example, read_table, write_table
from steppe.sweeps import Crew, Grid, Status, run_sweep, write_plan

OPTIMIZERS = ("adamw", "adam", "sgd", "msam", "sam", "sagm", "disam", "gam", "fad")
TUNING_SEED = 1000


@dataclass(frozen=True)
class Place:
    """A task: a dataset and the domain to leave out."""

    name: str
    family: str
    base: str
    dataset: str
    target: str
    options: Mapping[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        return {**self.options, "sources": list(probes.sources(self.dataset, self.target))}


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    table: Path = option(Path("table.json"), "The table to write.")
    real: Path | None = option(None, "Table of real images, whose regret the new table states.")
    images: list[Path] | None = option(
        None, "Real images instead of the tasks: folder DOMAIN/CLASS/IMAGE; repeatable."
    )
    image_size: int = option(32, "Height and width of the network's input, for real images.")
    batch: int = option(16, "Images per domain and update, for real images.")
    only: str = option("", "Only tasks whose name contains this text.")
    steps: int = option(FULL.steps, "Updates per run.", min=2)
    seeds: int = option(10, "Seeds per task and optimizer.", min=2)
    tuning_seeds: int = option(1, "Seeds for the learning rate.", min=1)
    overrides: list[str] | None = OVERRIDES

    def places(self) -> list[Place]:
        if not self.images:
            from steppe.domains.tasks import TASKS  # which registers them: tests count datasets

            plugins = {"plugins": ("steppe.domains.tasks",)}
            found = [Place(t.name, t.family, t.base, t.name, t.target, plugins) for t in TASKS]
        else:
            own = {"backbone": "small-cnn", "weights": "none", "image_size": self.image_size}
            own |= {"batch_size": self.batch}
            refuse_own(own, self.overrides or [])
            found = [
                Place(f"{name}-{domain.name}", name, name, str(folder), domain.name, own)
                for folder in self.images
                for name in [folder.name.removesuffix(".pack")]
                for domain in load(str(folder)).domains
            ]
        return [place for place in found if self.only in place.name]


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    places = options.places()
    if not places:
        raise UserError(f"no task's name contains {options.only!r}")
    tuning = range(TUNING_SEED, TUNING_SEED + options.tuning_seeds)
    tries = {
        place.name: {
            (probe := Probe(name, place.target, seed, factor)): _run(options, place, probe)
            for name, seed, factor in product(OPTIMIZERS, tuning, FACTORS)
        }
        for place in places
    }
    found = _carried_out("tuning", tries, options)
    rates = {name: probes.tuned(results) for name, (_, results) in found.items()}
    runs = {
        place.name: {
            (probe := Probe(name, place.target, seed, factor)): _run(options, place, probe)
            for (name, factor), seed in product(rates[place.name].items(), range(options.seeds))
        }
        for place in places
    }
    scores = {name: found for name, (_, found) in _carried_out("runs", runs, options).items()}
    short = {
        place.name: probes.grids(
            place.dataset, place.target, FULL, place.options, options.overrides or ()
        )
        for place in places
    }
    probed = _carried_out("probes", short, options)
    with ProcessPoolExecutor(options.workers or 2, get_context("spawn")) as pool:
        each = [pool.submit(_observed, *probed[place.name]) for place in places]
        values = [one.result() for one in track(each, "indicators")]
    examples = [
        Example(place.name, place.family, place.base, value, _scores(scores[place.name]))
        for place, value in zip(places, values, strict=True)
    ]
    facts = {
        "updates": options.steps,
        "seeds": options.seeds,
        "seeds for learning rates": options.tuning_seeds,
        "learning rates, relative to the default": ", ".join(f"{f:.3g}" for f in FACTORS),
    }
    known = {**environment(options.where, "python benchmarks/advise.py"), **facts}
    if not options.images and (words := trust(*map(_fitted, (examples, _real(options))))):
        known[TRUST] = words
    write_table(options.table, examples, known)
    return {"tasks": len(examples), **facts, "learning rates": rates}


def trust(examples: Sequence[Example], real: Sequence[Example]) -> str | None:
    """How good the advice is, in words; None if too few families are left to hold one out."""
    if len({one.family for one in examples}) <= FEWEST:
        return None
    found, usual = evaluate(examples, strategies(examples)), f"always:{BASELINE}"
    regret, less = found.regret("advised"), found.difference("advised", usual)
    words = (
        f"its choice is {regret.mean:.1f} points below the best optimizer (95% CI {regret.low:.1f} "
        f"to {regret.high:.1f}), {BASELINE} {found.regret(usual).mean:.1f}; the difference is "
        f"{less.mean:+.1f} (95% CI {less.low:+.1f} to {less.high:+.1f})"
    )
    if real:
        there = transferred(examples, real, strategies(examples)).regrets
        ours, theirs = (fmean(there[name].values()) for name in ("advised", usual))
        words += f". On {len(real)} targets of real images: {ours:.1f}, {BASELINE} {theirs:.1f}"
    return words


def _real(options: Options) -> tuple[Example, ...]:
    return () if options.real is None else read_table(options.real).examples


def _fitted(examples: Sequence[Example]) -> list[Example]:
    return [fitted(one) for one in examples]


def _run(options: Options, place: Place, probe: Probe) -> Grid:
    return short_run(
        place.dataset,
        probe.optimizer,
        probe.left_out,
        probe.seed,
        options.steps,
        probe.factor,
        place.given,
        options.overrides or (),
    )


def _carried_out(
    name: str, planned: Mapping[str, Mapping[Probe, Grid]], options: Options
) -> dict[str, tuple[dict[Probe, Path], dict[Probe, probes.Result]]]:
    """Run a sweep; return the folders of each task's runs, and their results."""
    every = [grid for grids in planned.values() for grid in grids.values()]
    sweep = write_plan(every, options.out / name, command=f"benchmarks advise {name}", extend=True)
    with Meter(name, len(sweep.names), console=stderr()) as meter:

        def show(status: Status) -> None:
            meter.update(status.counts["done"] + status.counts["failed"])

        run_sweep(sweep, crew=Crew(workers=options.workers, per_gpu=options.per_gpu), show=show)
    found = {}
    for task, grids in planned.items():
        done = probes.folders(sweep, grids)
        found[task] = done, probes.results(done, grids)
    return found


def _observed(done: Mapping[Probe, Path], found: Mapping[Probe, probes.Result]) -> Values:
    torch.set_num_threads(1)
    return observe(done, found, "cpu")


def _scores(found: Mapping[Probe, probes.Result]) -> dict[str, tuple[float, ...]]:
    """The accuracies of every optimizer by seed; a run that diverged is worth nothing."""
    scores: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for probe in sorted(found, key=lambda probe: probe.seed):
        scores[probe.optimizer].append(round(found[probe].left_out or 0.0, 4))
    return {name: tuple(values) for name, values in scores.items()}


main = command(Options, measure)
