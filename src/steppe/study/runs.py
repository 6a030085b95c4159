"""The runs of a study as a sweep: slots to grids, and finished runs to outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from steppe.reports import Run, load_runs
from steppe.reports.runs import Record
from steppe.reports.selection import best_step, candidates, mean_of, pooled
from steppe.reports.spent import device_of
from steppe.strangers import printable
from steppe.sweeps import Grid, Job, Sweep, look, read_plan, write_plan

from .decide import tuned
from .design import Design, Method, Plan
from .outcomes import Kind, Outcome, Outcomes, Slot

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
        tag=tag_of(slot.kind, slot.method, slot.choice),
    )


def tag_of(kind: Kind, method: str, choice: int) -> str:
    """The end of the names of a method's runs."""
    return method if kind == "run" else f"{method}.{kind}{choice or ''}"


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


def plan_runs(path: Path, plan: Plan, outcomes: Outcomes, slots: Iterable[Slot]) -> Sweep:
    """Add runs to the study's sweep."""
    asked = grids(plan.design, outcomes, slots)
    return write_plan(list(asked.values()), path / FOLDER, extend=True)


def slots(design: Design, sweep: Sweep) -> dict[str, Slot]:
    """The place of every run of the sweep in the study."""
    places = {tag_of(*place): place for method in design.methods for place in _places(method)}
    found = {}
    for run, axes in sweep.axes.items():
        if axes.get("tag") in places:
            kind, method, choice = places[axes["tag"]]
            seed = axes["trial"] - (TUNING_SEED if kind == "tune" else 0)
            found[run] = Slot(kind, method, seed, axes["targets"], choice)
    return found


def _places(method: Method) -> list[tuple[Kind, str, int]]:
    tuning: list[tuple[Kind, str, int]] = [
        ("tune", method.name, i) for i in range(len(method.tries))
    ]
    return [("run", method.name, 0), ("twin", method.name, 0), *tuning]


def collect(path: Path, plan: Plan, known: Outcomes) -> dict[Slot, Outcome]:
    """The known outcomes, with those of all runs that are over.

    A failed run that is to be retried has no outcome anymore.
    """
    found = dict(known)
    folder = path / FOLDER
    if not (folder / "sweep.json").exists():
        return found
    sweep = read_plan(folder)
    placed = slots(plan.design, sweep)
    chosen = any(slot.kind != "tune" for slot in placed.values())  # its choice is in use: it stays
    missing = {
        name: slot
        for name, slot in placed.items()
        if slot not in known
        or (known[slot].accuracy is None and not (chosen and slot.kind == "tune"))
    }
    if not missing:
        return found
    results = {Job(sweep.folder(name)).result: slot for name, slot in missing.items()}
    done = [result for result in results if result.exists()]
    counted = {
        results[run.path]: outcome_of(run, plan.design)
        for run in (load_runs(done).runs if done else ())
    }
    errors = {failure.name: failure.error for failure in look(sweep).failures}
    for name, slot in missing.items():
        if slot in counted:
            found[slot] = counted[slot]
        elif name in errors:
            found[slot] = Outcome(None, error=printable(errors[name])[:200])
        else:
            found.pop(slot, None)
    return found


def outcome_of(run: Run, design: Design) -> Outcome:
    """What a study keeps of a run."""
    record = _compared(run, design)
    sources = [key for key in record.accuracy if key[0] not in run.target_set and key[1] == "val"]
    targets = sorted(run.target_set)
    raw = [record.raw[target] for target in targets if target in record.raw]
    return Outcome(
        accuracy=_percent(on_all_images(run, record)),
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


def on_all_images(run: Run, record: Record) -> float | None:
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
