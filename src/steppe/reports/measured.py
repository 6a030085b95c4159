"""One curvature measurement of a run: in words, as a table, and as a row of the page."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from steppe import console
from steppe.errors import UserError

from .columns import Column
from .runs import MEASUREMENTS, Run

if TYPE_CHECKING:  # slow to import, and most reports have no measurements
    from steppe.measure import Measured

SHOWN = 5
"""Number of eigenvalues in a table."""
UNRESOLVED = 0.2
"""An eigenvalue is unresolved if its residual exceeds this fraction of it."""
DISAGREES = 0.1
"""A remark explains two estimates of λ_max whose relative difference exceeds this."""


@dataclass(frozen=True)
class MeasuredRun:
    """A measurement and its run."""

    run: Run
    measured: Measured


def _of(key: str, heading: str, where: str, meaning: str = "") -> Column[MeasuredRun]:
    value = attrgetter(f"measured.{where}")
    return Column(key, heading, value, meaning=meaning, better="low" if heading else "")


CURVATURE: list[Column[MeasuredRun]] = [
    _of("lambda_max", "λ_max", "lambda_max", "largest eigenvalue"),
    _of("trace", "trace", "trace.value"),
    _of("zeroth", "R0", "flatness.zeroth"),
    _of("first", "R1", "flatness.first"),
    _of("rho", "", "flatness.rho"),
    Column("loss", "loss", attrgetter("measured.loss")),
]
"""Columns to compare runs by. Those without a heading are only in JSON."""

FLATNESS: list[Column[MeasuredRun]] = [
    Column("name", "method", attrgetter("run.row.name"), word=True),
    *CURVATURE[:4],
    _of("fad", "R_FAD", "flatness.fad"),
    Column("rho", "ρ", attrgetter("measured.flatness.rho")),
    Column("alpha", "α", attrgetter("measured.flatness.alpha")),
    CURVATURE[5],
    Column("images", "images", attrgetter("measured.images")),
    Column("measured", "measured on", attrgetter("measured.name"), word=True),
    Column("dataset", "dataset", attrgetter("measured.dataset"), word=True),
    Column("run", "run", lambda one: str(one.run.path), word=True),
    Column("conditions", "", lambda one: list(conditions(one.measured).values())),
    Column("trace_err", "", attrgetter("measured.trace.stderr")),
    Column("spectrum", "", lambda one: list(one.measured.eigenvalues.values)),
]
"""Columns of the page's flatness table."""


def conditions(measured: Measured) -> dict[str, object]:
    """Conditions that must agree for measurements to be comparable."""
    drawn = any(sample.images < sample.of for sample in measured.domains)
    return {
        "dataset": measured.dataset,
        "domains": ", ".join(f"{s.domain} ({s.part})" for s in measured.domains),
        "images": measured.images,
        "seed of the images": measured.seed if drawn else "none (all images used)",
        "parameters": measured.parameters,
        "weights": measured.weights.which,
        "loss": measured.loss_function,
        "precision": measured.precision,
        "top": len(measured.eigenvalues.values),
    }


def described(measured: Measured, steps: Collection[int] = ()) -> str:
    """What was measured, in words. `steps` are those of other measurements in a comparison."""
    trained = all(sample.part == "train" for sample in measured.domains)
    kind = "training images" if trained else "images"
    names = ", ".join(sample.domain for sample in measured.domains)
    after = {*steps, measured.weights.step}
    which = measured.weights.which
    weights = "weights" if which.startswith("step:") else f"{which} weights"
    if len(after) == 1:  # the best step may differ between runs
        weights += f" after step {after.pop()}"
    if measured.weights.averaged:
        weights += ", averaged"
    return (
        f"{measured.loss_function} on {measured.images:,} {kind} of {names} "
        f"({measured.dataset}); {weights}, {measured.precision}"
    )


def measured_table(measured: Measured) -> console.Table:
    flat, trace, spectrum = measured.flatness, measured.trace, measured.eigenvalues
    table = console.Table(title=console.text(f"Hessian of the {described(measured)}"))
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("details", overflow="fold")
    pairs = list(enumerate(zip(spectrum.values, spectrum.residuals, strict=True), start=1))
    for rank, (value, residual) in pairs[:SHOWN] + pairs[SHOWN:][-1:]:
        name = "largest eigenvalue λ_max" if rank == 1 else f"eigenvalue {rank}"
        table.add_row(name, f"{value:.5g}", f"residual {residual:.1e}")
    interval = f"± {trace.stderr:.2g}; 95% CI {trace.low:.5g} to {trace.high:.5g}"
    short = "" if trace.converged else "; not converged"
    table.add_row("trace", f"{trace.value:.5g}", interval + short)
    table.add_section()
    radius = f"ρ = {flat.rho:g}"
    for name, value, one_step in (
        (f"R0 ({radius})", flat.zeroth, flat.zeroth_one_step),
        (f"R1 ({radius})", flat.first, flat.first_one_step),
        (f"R_FAD ({radius}, α = {flat.alpha:g})", flat.fad, flat.fad_one_step),
    ):
        share = f", {one_step / value:.0%} of it" if value > 0 else ""
        table.add_row(name, f"{value:.4g}", f"one step finds {one_step:.4g}{share}")
    how = "exact at a minimum of a quadratic"
    table.add_row("λ_max by Eq. 4 from R_FAD", f"{flat.lambda_max:.5g}", how)
    table.add_section()
    table.add_row("loss", f"{measured.loss:.4g}", "")
    table.add_row("gradient norm", f"{measured.gradient_norm:.4g}", "0 at a minimum")
    return table


def remarks(measured: Measured) -> list[str]:
    """Caveats for the reader of a measurement."""
    flat, spectrum, largest = measured.flatness, measured.eigenvalues, measured.lambda_max
    pairs = zip(spectrum.values, spectrum.residuals, strict=True)
    unresolved = any(residual > UNRESOLVED * abs(value) for value, residual in pairs)
    trace = measured.trace
    found = []
    if not spectrum.converged:
        found.append("not all eigenvalues converged: check the residuals")
    if unresolved:
        found.append("some eigenvalues are close to the tolerance and unresolved: lower --tol")
    if not trace.converged:
        reached = f"{trace.stderr / abs(trace.value):.1%}" if trace.value else "all"
        found.append(
            f"the trace did not converge: its relative standard error is {reached}, above the "
            f"requested {100 * trace.rtol:g}%. Raise --top, --trace-rtol or --images"
        )
    if not flat.converged:
        found.append("the ascent for R0 or R1 stopped while still rising: both may be larger")
    if abs(flat.lambda_max - largest) > DISAGREES * abs(largest):
        # At a minimum of a quadratic the gradient is 0, and R0 is rho^2 lambda_max / 2.
        found.append(
            f"Eq. 4 gives {flat.lambda_max:.3g}, but λ_max is {largest:.3g}. Either the weights "
            f"are not at a minimum (gradient norm = {measured.gradient_norm:.2g}, ρ λ_max = "
            f"{flat.rho * largest:.2g}), or the loss is not quadratic within ρ (R0 = "
            f"{flat.zeroth:.2g}, ρ² λ_max / 2 = {flat.rho**2 * largest / 2:.2g})"
        )
    return found


def find_measured(runs: Sequence[Run]) -> tuple[list[MeasuredRun], list[str]]:
    """Measurements of the runs, sorted by method, and errors from unreadable files."""
    found: list[MeasuredRun] = []
    problems: list[str] = []
    for run in runs:
        # A string is faster than a Path, and there may be many runs.
        if not os.path.isdir(f"{run.path}/{MEASUREMENTS}"):
            continue
        from steppe.measure import load_measurements

        try:
            found += [MeasuredRun(run, one) for one in load_measurements(run.path).values()]
        except (UserError, OSError) as error:
            problems.append(str(error))
    found.sort(key=lambda one: (*one.run.row.order, *one.run.order, one.measured.name))
    return found, problems
