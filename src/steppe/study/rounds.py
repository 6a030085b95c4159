"""Plan a study and carry it out: rounds of runs until every confirmatory claim is decided."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import stdev
from typing import Any

from steppe import __version__
from steppe.domains import dataset_spec
from steppe.errors import RunError, UserError
from steppe.optim import optimizer_spec
from steppe.sweeps import Sweep, cost, jobs, look, read_plan, target_sets
from steppe.sweeps.growing import growing
from steppe.training.config import RunConfig

from .decide import State, differences, state
from .design import FILE, Claim, Design, Method, Plan, parsed, read_design, write_design
from .outcomes import Outcome, Slot, read_outcomes, write_outcomes
from .power import Forecast, forecast
from .runs import FOLDER, collect, grid, plan_runs
from .sequence import first_look

Execute = Callable[[Path], bool | None]
"""Executes the remaining runs of a sweep; None if it only submitted workers."""


@dataclass(frozen=True)
class Study:
    """A study's plan, outcomes and state."""

    path: Path
    plan: Plan
    outcomes: Mapping[Slot, Outcome]
    state: State


def plan_study(
    path: Path,
    *,
    dataset: str,
    claims: Sequence[tuple[str, str]],
    explore: Sequence[tuple[str, str]] = (),
    methods: Sequence[Method] = (),
    targets: str = "single",
    tune: Mapping[str, Sequence[tuple[float, bool]]] | None = None,
    command: str = "",
    **settings: Any,
) -> Study:
    """Plan a study and its first runs.

    Args:
        path: the study's folder.
        dataset: a name, or a folder DOMAIN/CLASS/IMAGE.
        claims: pairs of methods, which share the error rate.
        explore: pairs of methods that are compared without deciding anything.
        methods: methods that are more than an optimizer's name.
        targets: as `steppe.sweeps.Grid.targets`.
        tune: for a config key, the values that every method with this key tries; True marks
            multiples of the method's default.
        command: the command line, for the record.
        **settings: fields of `Design`.
    """
    if (path / FILE).exists():
        raise UserError(
            f"{path} already contains a study, whose design is fixed: pass --extend to add "
            "exploratory claims, or plan another study in a new folder"
        )
    own = {method.name: method for method in methods}
    if len(own) < len(methods):
        raise UserError(f"two methods have the same name: {[m.name for m in methods]}")

    def claimed(pair: tuple[str, str], confirmatory: bool) -> Claim:
        a, b = (name if name in own else optimizer_spec(name).name for name in pair)
        return Claim(a=a, b=b, confirmatory=confirmatory)

    pairs = [claimed(pair, True) for pair in claims] + [claimed(pair, False) for pair in explore]
    used = dict.fromkeys(name for claim in pairs for name in (claim.a, claim.b))
    for name in own.keys() - used.keys():
        raise UserError(f"no claim compares the method {name!r}: leave it out, or add --claim")
    values = {
        **settings,
        "dataset": dataset,
        "targets": ["+".join(held) for held in target_sets(dataset_spec(dataset), targets)],
        "claims": pairs,
        "methods": [own.get(name) or Method(name=name, optimizer=name) for name in used],
    }
    design: Design = parsed(Design, values, "the study")
    if "first_seeds" not in settings:
        values["first_seeds"] = min(first_look(design.level), design.max_seeds)
    # Every config is built before anything is written, so that its errors come first.
    values["methods"] = _completed(design, tune or {})
    design = parsed(Design, values, "the study")
    commands = (command,) if command else ()
    plan = Plan(design=design, digest=design.digest(), commands=commands, steppe=__version__)
    first = state(plan, {}).todo
    path.mkdir(parents=True, exist_ok=True)
    plan_runs(path, plan, {}, first)
    write_design(path, plan)  # last, so that an interrupted plan is not one
    return load_study(path)


def _completed(
    design: Design, tune: Mapping[str, Sequence[tuple[float, bool]]]
) -> tuple[Method, ...]:
    """The methods, each with all combinations of the tuned settings that it has.

    Their average covers at least the second half of a run: its default start may be after the last
    update of a short one.
    """
    found, left = [], dict.fromkeys(tune)
    for method in design.methods:
        config = next(jobs(grid(design, Slot("run", method.name, 0, design.targets[0]), ())))[1]
        fixed = {text.partition("=")[0].strip() for text in method.overrides}
        texts = []
        for key, values in tune.items():
            default = _number(config, key)
            if key in fixed or default is None:
                continue
            left.pop(key, None)
            numbers = [default * value if relative else value for value, relative in values]
            texts.append([f"{key}={float(f'{number:.4g}'):g}" for number in numbers])
        tries = tuple(product(*texts)) if texts else ()
        overrides, start = method.overrides, _number(config, "averaging.start")
        said = any(text.startswith("averaging.start=") for text in (*design.overrides, *overrides))
        if method.averaging == "none" and not said and (start or 0) > config.steps // 2:
            overrides = (f"averaging.start={config.steps // 2}", *overrides)
        found.append(method.model_copy(update={"tries": tries, "overrides": overrides}))
    for key in left:
        raise UserError(f"no method has a number {key!r} to tune, such as optimizer.lr")
    return tuple(found)


def _number(config: RunConfig, key: str) -> float | None:
    """The value of a setting such as `optimizer.lr`; None if it is not a number."""
    field, dot, option = key.partition(".")
    value = getattr(config, field, None)
    if dot:
        value = getattr(value, "options", {}).get(option)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def extend_study(path: Path, pairs: Iterable[tuple[str, str]], command: str = "") -> Study:
    """Add exploratory claims between the methods of a study."""
    study = load_study(path)
    seeds = len({slot.seed for slot in study.outcomes if slot.kind == "run"})
    new = [Claim(a=a, b=b, confirmatory=False, added_after=seeds) for a, b in pairs]
    facts = study.plan.model_dump()
    facts["added"] = [*facts["added"], *(claim.model_dump() for claim in new)]
    facts["commands"] = [*facts["commands"], command]
    write_design(path, parsed(Plan, facts, "the study"))
    return load_study(path)


def load_study(path: Path) -> Study:
    """Read a study, and add the results of runs that have finished to its ledger.

    A folder that cannot be written to is only read.
    """
    plan = read_design(path)
    known = read_outcomes(path, plan)
    found = collect(path, plan, known)
    if found != known and os.access(path, os.W_OK):
        write_outcomes(path, plan.digest, found)
    return Study(path, plan, found, state(plan, found))


def run_study(
    path: Path, execute: Execute, say: Callable[[str], None] = lambda line: None
) -> bool | None:
    """Run a study to its end, or to where it ends for now.

    Args:
        path: the study's folder.
        execute: executes the study's sweep.
        say: receives a line per round.

    Returns:
        Whether the study is over; None if `execute` only submitted workers.
    """
    while True:
        study = load_study(path)
        if study.state.over:
            return True
        say(round_line(study))
        sweep = plan_next(study)
        with growing(lambda: _grow(path)):
            complete = execute(sweep.path)
        if complete is None:
            return None
        if load_study(path).outcomes == study.outcomes:
            raise RunError(
                f"no run of this round has a result: {sweep.path} has their logs; see "
                f"'steppe sweep status {sweep.path}'"
            )


def plan_next(study: Study) -> Sweep:
    return plan_runs(study.path, study.plan, study.outcomes, study.state.todo)


def _grow(path: Path) -> bool:
    """Plan the next round as soon as this one is complete; return whether the study is over."""
    study = load_study(path)
    if not study.state.over:
        plan_next(study)
    return study.state.over


def round_line(study: Study) -> str:
    kinds = {slot.kind for slot in study.state.todo}
    runs = f"{len(study.state.todo)} runs"
    for kind, words in (("tune", "tuning"), ("twin", "twins")):
        if kinds == {kind}:
            return f"{words}: {runs}"
    still = [r.claim.name for r in study.state.rulings if r.open and r.claim.confirmatory]
    return f"{runs}, open claims: {', '.join(still)}"


@dataclass(frozen=True)
class Need:
    """What a claim is expected to need."""

    claim: Claim
    spread: float
    apart: Forecast
    """If the methods differ by the smallest effect that matters."""
    same: Forecast
    """If they do not differ."""
    hours: float | None
    """For the seeds that are enough in both cases."""


def needs(study: Study, spreads: Mapping[str, float], seconds: Mapping[str, float]) -> list[Need]:
    """Forecast every confirmatory claim.

    Args:
        study: the study.
        spreads: standard deviations over seeds by claim, in points; ``""`` is for all others.
        seconds: expected duration of a run by method.
    """
    design = study.plan.design
    found = []
    for claim in design.claims:
        if not claim.confirmatory or (s := spreads.get(claim.name, spreads.get(""))) is None:
            continue
        apart = forecast(design, s, design.smallest_effect, design.level)
        same = forecast(design, s, 0.0, design.level)
        each = [seconds.get(name, 0.0) for name in (claim.a, claim.b)]
        enough = max(f.enough or design.max_seeds for f in (apart, same))
        hours = enough * len(design.targets) * sum(each) / 3600 if all(each) else None
        found.append(Need(claim, s, apart, same, hours))
    return found


def spread_of(study: Study) -> dict[str, float]:
    """The spread of every claim over the seeds that a pilot has run so far, if these are three."""
    found = {}
    for claim in study.plan.claims:
        values = differences(study.plan.design, study.outcomes, claim)
        if len(values) > 2:
            found[claim.name] = stdev(values)
    return found


def timed(study: Study) -> dict[str, float]:
    """Expected seconds of a run by method, from one pass timed on this machine."""
    sweep = read_plan(study.path / FOLDER)
    found = cost.estimate(sweep)
    per_pass = (found.seconds or 0.0) / max(1, found.passes)
    seconds = {}
    for method in study.plan.design.methods:
        slot = Slot("run", method.name, 0, study.plan.design.targets[0])
        config = next(jobs(grid(study.plan.design, slot, ())))[1]
        seconds[method.name] = per_pass * config.steps * optimizer_spec(method.optimizer).passes
    return seconds


def status(study: Study) -> dict[str, Any]:
    """The state of a study as plain values."""
    folder = study.path / FOLDER
    sweep: Sweep | None = read_plan(folder) if (folder / "sweep.json").exists() else None
    return {
        "over": study.state.over,
        "open": [r.claim.name for r in study.state.rulings if r.open],
        "runs left in this round": len(study.state.todo),
        "outcomes": len(study.outcomes),
        "sweep": None if sweep is None else dict(look(sweep).counts),
    }
