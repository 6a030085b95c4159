"""Run an experiment: plan it as a sweep, execute it, and write its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steppe import durable
from steppe.measure import Settings, load_measurements, measure_run
from steppe.measure.measuring import RHO
from steppe.reports import build_report, compare, draw, load_runs, write
from steppe.reports.render import to_markdown
from steppe.reports.spectra import save_figure
from steppe.sweeps import Grid, Sweep, jobs, look, write_plan
from steppe.sweeps.growing import diverged, growing

from .order import Case, Order, Rate, cases, choose_rates, default_rates, grids, tuning_grids
from .results import Results, gather, look_at, made, result_folders, short, to_json
from .tables import tables

CarryOut = Callable[[Sweep], object]
"""Executes the remaining runs of a sweep."""


def plan(order: Order, out: Path, command: str = "") -> tuple[Sweep, dict[Case, Rate] | None]:
    """Plan the tuning runs of an experiment, and all runs whose learning rate is known.

    Returns:
        The sweep, and the learning rates or None while tuning is incomplete. A case whose tuning
        runs all diverged has no learning rate.
    """
    if not order.tunes:
        rates = default_rates(order)
        return write_plan(grids(order, rates), out, command=command, extend=True), rates
    tries = tuning_grids(order)
    sweep = write_plan(tries, out, command=command, extend=True)
    planned, diverged = result_folders(sweep, tries), _diverged(sweep, tries)
    done = [path for _, path in planned if path.exists()]
    rates = choose_rates(order, load_runs(done).runs if done else (), diverged)
    if rates:
        sweep = write_plan(grids(order, rates), out, command=command, extend=True)
    return sweep, rates if len(done) + len(diverged) == len(planned) else None


def _diverged(sweep: Sweep, tries: Sequence[Grid]) -> list[Grid]:
    """Tuning runs that diverged."""
    by_name = {name: grid for grid in tries for name, _ in jobs(grid)}
    return [by_name[name] for name in diverged(sweep, by_name)]


def reproduce(
    order: Order,
    out: Path,
    carry_out: CarryOut,
    *,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Results:
    """Run an experiment to completion, reusing finished runs.

    Args:
        order: the experiment to run.
        out: folder for the sweep and its results.
        carry_out: executes the remaining runs of a sweep.
        command: the command line, for the record.
        say: receives progress messages.
    """
    sweep, rates = plan(order, out, command)
    if rates is None:
        tries = len(tuning_grids(order))
        say(f"tuning learning rates with {tries:,} short runs in {out}; full runs follow")
        with growing(lambda: plan(order, out, command)[1] is not None):
            carry_out(sweep)
        sweep, rates = plan(order, out, command)
    if rates is None:
        problem = f"some learning-rate tuning runs have no result: {look_at(sweep)}"
        return Results(order, {}, (), (problem,))
    if not look(sweep).over:
        say(f"{order.experiment.name}: {len(sweep.names):,} runs in {out}")
        carry_out(sweep)
    found = gather(order, sweep, rates)
    lost = [
        f"{case.method.name} on {short(case.dataset)}, target {case.targets}: diverged with every "
        "learning rate tried; use --factors to try others"
        for case in cases(order)
        if case not in rates
    ]
    found = replace(found, problems=(*found.problems, *lost))
    return _measured(found, say) if order.experiment.curvature and found.variants else found


def _measured(found: Results, say: Callable[[str], None]) -> Results:
    """Measure the curvature of every selected model that has not been measured yet.

    All models use the same radius, not their optimizer's, so that flatness is comparable.
    """
    chosen = [c.run for v in found.variants for c in v.selected.chosen.values()]
    for number, run in enumerate(chosen, start=1):
        if not load_measurements(run.path):
            say(f"curvature of {run.path.parent.name}, {number} of {len(chosen)}")
            root = found.order.options.get("root")
            device = found.order.options.get("device", "auto")
            options = found.order.scale.curvature
            measure_run(run.path, Settings(rho=RHO, **options), root=root, device=device)
    return replace(found, curvature=compare(chosen) if len(chosen) > 1 else None)


def write_results(
    found: Results, out: Path, facts: Mapping[str, Any], command: str = ""
) -> list[Path]:
    """Write the results of an experiment: Markdown, JSON, a figure, and the report page.

    Args:
        found: from `reproduce`.
        out: the output folder.
        facts: machine and versions, for the JSON.
        command: the command line, for the record.
    """
    if not found.variants:  # keep the files of an earlier run
        return []
    values = out / "results.json"
    stored = {"environment": dict(facts), **to_json(found)}
    durable.replace(values, (json.dumps(stored, indent=1) + "\n").encode())
    experiment = found.order.experiment
    pictures: dict[Path, str] = {}
    if experiment.figure is not None:
        pictures[out / "figure.svg"] = experiment.about
        save_figure(experiment.figure(found), out / "figure.svg")
    if found.curvature is not None:
        pictures[out / "spectra.svg"] = f"Hessian of the {found.curvature.about}"
        draw(found.curvature, out / "spectra.svg")
    text = out / "results.md"
    durable.replace(text, markdown(found, [path.name for path in pictures], command).encode())
    runs = [run.path for variant in found.variants for run in variant.selected.runs]
    report = build_report(load_runs(runs), "train-val", command, out.name)
    drawn = {title: path.read_text() for path, title in pictures.items()}
    page = out / "report.html"
    durable.replace(page, write(replace(report, figures=drawn), "html").encode())
    return [values, *pictures, text, page]


def markdown(found: Results, pictures: list[str], command: str = "") -> str:
    experiment = found.order.experiment
    where = f" (`{experiment.label}` in the paper)" if experiment.label else ""
    parts = [
        f"# {experiment.name}\n",
        f"{experiment.about[0].upper()}{experiment.about[1:]}{where}.\n",
        f"Scale `{found.order.scale.name}`: {_made(found)}.\n",
        *([f"```bash\n{command}\n```\n"] if command else []),
        *(f"![{experiment.about}]({name})\n" for name in pictures),
        *(to_markdown(table) for table in tables(found)),
        *(f"- {problem}" for problem in found.problems),
    ]
    return "\n".join(parts) + "\n"


def _made(found: Results) -> str:
    """The settings of the runs, in words."""
    facts = made(found)
    numbers = [(facts[f"{word}s"], word) for word in ("trial", "draw")]
    counts = [f"{n} {word}{'s' * (n != 1)}" for n, word in numbers if n]
    words = {"steps": "steps", "batch_size": "images per domain", "backbone": "", "weights": ""}
    named = [
        f"{', '.join(f'{v:,}' if isinstance(v, int) else v for v in facts[key])} {word}".strip()
        for key, word in words.items()
        if facts[key]
    ]
    return "; ".join([", ".join(counts), *named, *facts["overrides"]])
