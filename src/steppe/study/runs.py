"""The runs of a study as a sweep: slots to grids, and finished runs to outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from steppe.reports import Run, load_runs
from steppe.reports.runs import Record
from steppe.reports.selection import best_step, candidates, mean_of, pooled
from steppe.reports.spent import device_of
from steppe.strangers import printable
from steppe.sweeps import Grid, Job, Sweep, jobs, look, read_plan, write_plan

from .decide import tuned
from .design import Design, Plan
from .outcomes import Outcome, Outcomes, Slot

FOLDER = "sweep"
TUNING_SEED = 1000
"""The first trial seed of tuning runs: never one of the claims'."""
AVERAGE = "sma"
"""The moving average of the endpoint, for methods without averaging of their own."""
TWIN = 1
"""Units in the last place by which a twin's initial weights differ."""


def grid(design: Design, slot: Slot, settings: Iterable[str]) -> Grid:
    """The grid of one run, with the settings that tuning chose or tries."""
    method = design.method(slot.method)
    averaging, both = method.averaging, []
    if design.endpoint == "average":
        averaging = AVERAGE if averaging == "none" else averaging
        both = ["evaluate_both=true"]
    tag = slot.method if slot.kind == "run" else f"{slot.method}.{slot.kind}{slot.choice or ''}"
    return Grid(
        datasets=(design.dataset,),
        algorithms=(method.algorithm,),
        optimizers=(method.optimizer,),
        averaging=(averaging,),
        first_trial=slot.seed + (TUNING_SEED if slot.kind == "tune" else 0),
        trials=1,
        draws=0,
        targets=slot.target,
        space=design.space,
        overrides=(
            *both,
            *design.overrides,
            *method.overrides,
            *settings,
            *([f"twin={TWIN}"] if slot.kind == "twin" else []),
        ),
        options=design.options,
        tag=tag,
    )


def grids(design: Design, outcomes: Outcomes, slots: Iterable[Slot]) -> dict[Slot, Grid]:
    found = {}
    for slot in slots:
        method = design.method(slot.method)
        settings = (
            method.tries[slot.choice]
            if slot.kind == "tune"
            else tuned(design, outcomes, slot.method, slot.target)
        )
        found[slot] = grid(design, slot, settings)
    return found


def names(asked: Mapping[Slot, Grid]) -> dict[Slot, str]:
    """The name of each slot's run in the sweep."""
    return {slot: next(jobs(one))[0] for slot, one in asked.items()}


def plan_runs(path: Path, plan: Plan, outcomes: Outcomes, slots: Iterable[Slot]) -> Sweep:
    """Add runs to the study's sweep."""
    asked = grids(plan.design, outcomes, slots)
    return write_plan(list(asked.values()), path / FOLDER, extend=True)


def collect(
    path: Path, plan: Plan, outcomes: Outcomes, slots: Iterable[Slot]
) -> dict[Slot, Outcome]:
    """The outcomes of those slots whose runs are over."""
    folder = path / FOLDER
    if not (folder / "sweep.json").exists():
        return {}
    sweep = read_plan(folder)
    named = names(grids(plan.design, outcomes, slots))
    results = {
        slot: Job(sweep.folder(name)).result for slot, name in named.items() if name in sweep.axes
    }
    done = {result: slot for slot, result in results.items() if result.exists()}
    found: dict[Slot, Outcome] = {}
    for run in load_runs(list(done)).runs if done else ():
        slot = done[run.path]
        found[slot] = outcome_of(run, plan.design, slot)
    errors = {failure.name: failure.error for failure in look(sweep).failures}
    for slot, name in named.items():
        if slot not in found and name in errors:
            found[slot] = Outcome(None, error=printable(errors[name])[:200])
    return found


def outcome_of(run: Run, design: Design, slot: Slot) -> Outcome:
    """What a study keeps of a run."""
    record = _compared(run, design)
    sources = [key for key in record.accuracy if key[0] not in run.target_set and key[1] == "val"]
    targets = sorted(run.target_set)
    raw = [record.raw[target] for target in targets if target in record.raw]
    return Outcome(
        accuracy=_percent(_on_all_images(run, record)),
        other=_percent(sum(raw) / len(raw)) if len(raw) == len(targets) else None,
        validation=_percent(mean_of(record, sources)),
        seconds=round(run.seconds, 3),
        device=device_of(run),
    )


def _compared(run: Run, design: Design) -> Record:
    """The record of the endpoint."""
    chosen = best_step(run) if design.selection == "train-val" else None
    usable = candidates(run)
    if chosen is None:
        return usable[-1]
    return next(record for record in reversed(usable) if record.step == chosen.step)


def _on_all_images(run: Run, record: Record) -> float | None:
    """Accuracy on all images of the held-out domains, each domain with the same weight."""
    found = []
    for target in sorted(run.target_set):
        parts = [key for key in record.accuracy if key[0] == target]
        value = pooled(run.images, record, parts)
        found.append(mean_of(record, parts) if value is None else value)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if len(known) == len(found) else None


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 6)
