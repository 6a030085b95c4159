"""Curvature of runs side by side: the paper's Figure 3 as numbers, and rows for the page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from steppe.errors import UserError

from .runs import MEASUREMENTS, Row, Run

if TYPE_CHECKING:  # slow to import, and most reports have no measurements
    from steppe.training import Measured

NAMED = 5
"""Runs that a message names."""
SHOWN = 5
"""Eigenvalues that a table shows."""


@dataclass(frozen=True)
class MeasuredRun:
    """A measurement, and the run that it is of."""

    run: Run
    measured: Measured


@dataclass(frozen=True)
class Spread:
    """A mean and how sure it is.

    Attributes:
        mean: over the runs.
        err: the standard error over the runs, as in the tables of accuracies; of a single run, that
            of its estimate, or None where it has none.
    """

    mean: float
    err: float | None


@dataclass(frozen=True)
class MethodCurvature:
    """What was measured of the runs of one method."""

    row: Row
    runs: tuple[MeasuredRun, ...]

    @property
    def spectra(self) -> list[tuple[float, ...]]:
        """The eigenvalues of each run, largest first."""
        return [run.measured.eigenvalues.values for run in self.runs]

    @property
    def spectrum(self) -> list[float]:
        """The mean over the runs, rank by rank."""
        return [float(value) for value in np.mean(self.spectra, axis=0)]

    @property
    def lambda_max(self) -> Spread:
        """The largest eigenvalue."""
        return _spread([run.measured.lambda_max for run in self.runs], None)

    @property
    def trace(self) -> Spread:
        """The trace."""
        values = [run.measured.trace for run in self.runs]
        return _spread([value.value for value in values], values[0].stderr)


@dataclass(frozen=True)
class Comparison:
    """Methods whose curvature was measured in the same way."""

    methods: tuple[MethodCurvature, ...]

    @property
    def about(self) -> str:
        """What was measured, in words."""
        return described(self.methods[0].runs[0].measured)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "measured": self.about,
            "methods": [
                {
                    **method.row._asdict(),
                    "name": method.row.name,
                    "lambda_max": {"mean": method.lambda_max.mean, "err": method.lambda_max.err},
                    "trace": {"mean": method.trace.mean, "err": method.trace.err},
                    "spectrum": method.spectrum,
                    "runs": [
                        {
                            "run": str(one.run.path),
                            "lambda_max": one.measured.lambda_max,
                            "trace": one.measured.trace.value,
                            "spectrum": list(one.measured.eigenvalues.values),
                        }
                        for one in method.runs
                    ],
                }
                for method in self.methods
            ],
        }


def compare(
    runs: Sequence[Run], domains: Sequence[str] | None = None, which: str = "last"
) -> Comparison:
    """Put measurements of several runs side by side, by method.

    Args:
        runs: from `load_runs`; every one must have been measured.
        domains: the domains of the measurements; those that each run was trained on unless given.
        which: the weights that were measured, last or best.
    """
    from steppe.training import load_measurements

    found, missing = [], []
    for run in runs:
        known = load_measurements(run.path)
        name = _name(known, domains, which)
        if name in known:
            found.append(MeasuredRun(run, known[name]))
        else:
            missing.append(run.path)
    if missing:
        raise UserError(_not_measured(missing, domains, which))
    if len(found) < 2:
        raise UserError(f"{len(found)} run was found: a comparison needs at least two")
    _check_alike(found)
    by_row: dict[Row, list[MeasuredRun]] = {}
    for one in found:
        by_row.setdefault(one.run.row, []).append(one)
    ordered = sorted(by_row, key=lambda row: row.order)
    return Comparison(tuple(MethodCurvature(row, tuple(by_row[row])) for row in ordered))


def _name(known: Mapping[str, Measured], domains: Sequence[str] | None, which: str) -> str:
    """The measurement of these domains, in whatever order they are named."""
    if domains is not None:
        for name, measured in known.items():
            same = {sample.domain for sample in measured.domains} == set(domains)
            if same and measured.weights.which == which:
                return name
    from steppe.training.measured import measurement_name

    return measurement_name(domains, which)


def _not_measured(missing: Sequence[Path], domains: Sequence[str] | None, which: str) -> str:
    options = "".join(f" --domain {shlex.quote(name)}" for name in domains or ())
    options += "" if which == "last" else f" --which {which}"
    what = f" with{options}" if options else ""
    listed = "\n".join(f"  {path}" for path in missing[:NAMED])
    more = f"\n  and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
    command = f"steppe curvature {shlex.quote(str(missing[0]))}{options}"
    count = f"{len(missing):,} run{'s were' if len(missing) > 1 else ' was'}"
    return f"{count} not measured{what}:\n{listed}{more}\nMeasure each, for instance: {command}"


def _conditions(measured: Measured) -> dict[str, object]:
    """What must agree for numbers to be comparable."""
    return {
        "dataset": measured.dataset,
        "domains": ", ".join(f"{s.domain} ({s.part})" for s in measured.domains),
        "images": measured.images,
        "weights": measured.weights.which,
        "loss": measured.loss_function,
        "precision": measured.precision,
        "top": len(measured.eigenvalues.values),
    }


def _check_alike(found: Sequence[MeasuredRun]) -> None:
    first = found[0]
    ours = _conditions(first.measured)
    for other in found[1:]:
        for what, theirs in _conditions(other.measured).items():
            if theirs != ours[what]:
                raise UserError(
                    f"{other.run.path} was measured differently from {first.run.path}: {what} "
                    f"{theirs} and {ours[what]}. Compare runs with the same sources, measured with "
                    "the same options."
                )


def _spread(values: Sequence[float], alone: float | None) -> Spread:
    if len(values) == 1:
        return Spread(values[0], alone)
    return Spread(float(np.mean(values)), float(np.std(values) / np.sqrt(len(values))))


def described(measured: Measured) -> str:
    """What was measured, in words.

    Names the loss, the images and the weights.
    """
    samples = measured.domains
    parts = {"train": "training images", "all": "images"}
    kinds = {sample.part for sample in samples}
    kind = parts[kinds.pop()] if len(kinds) == 1 else "images"
    names = ", ".join(sample.domain for sample in samples)
    weights = f"{measured.weights.which} weights"
    if measured.weights.averaged:
        weights += ", averaged"
    return (
        f"{measured.loss_function} on {measured.images:,} {kind} of {names} "
        f"({measured.dataset}); {weights}, {measured.precision}"
    )


def comparison_table(comparison: Comparison) -> Table:
    """A comparison for the terminal."""
    table = Table(title=f"Hessian of the {comparison.about}")
    table.add_column("method", overflow="fold")
    for heading in ("runs", "λ_max", f"λ_2 ... λ_{SHOWN}", "trace"):
        table.add_column(heading, justify="right")
    for method in comparison.methods:
        rest = "  ".join(f"{value:.4g}" for value in method.spectrum[1:SHOWN])
        table.add_row(
            method.row.name,
            str(len(method.runs)),
            _plus_minus(method.lambda_max),
            rest or "–",
            _plus_minus(method.trace),
        )
    return table


def measured_table(measured: Measured) -> Table:
    """A measurement for the terminal."""
    flat, trace, spectrum = measured.flatness, measured.trace, measured.eigenvalues
    table = Table(title=f"Hessian of the {described(measured)}")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("how exact", overflow="fold")
    for i, pair in enumerate(zip(spectrum.values, spectrum.residuals, strict=True)):
        if i < SHOWN:
            name = "largest eigenvalue λ_max" if i == 0 else f"eigenvalue {i + 1}"
            table.add_row(name, f"{pair[0]:.5g}", f"residual {pair[1]:.1e}")
    if len(spectrum.values) > SHOWN:
        last = len(spectrum.values)
        residual = f"residual {spectrum.residuals[-1]:.1e}"
        table.add_row(f"eigenvalue {last}", f"{spectrum.values[-1]:.5g}", residual)
    interval = f"± {trace.stderr:.2g}; 95 % from {trace.low:.5g} to {trace.high:.5g}"
    table.add_row("trace", f"{trace.value:.5g}", interval)
    table.add_section()
    radius = f"ρ = {flat.rho:g}"
    for name, value, one_step in (
        (f"R0 ({radius})", flat.zeroth, flat.zeroth_one_step),
        (f"R1 ({radius})", flat.first, flat.first_one_step),
        (f"R_FAD ({radius}, α = {flat.alpha:g})", flat.fad, flat.fad_one_step),
    ):
        share = f", {100 * one_step / value:.0f} % of it" if value > 0 else ""
        table.add_row(name, f"{value:.4g}", f"one step finds {one_step:.4g}{share}")
    table.add_row("λ_max by Eq. 4 from R_FAD", f"{flat.lambda_max:.5g}", "exact at a minimum")
    table.add_section()
    table.add_row("loss", f"{measured.loss:.4g}", "")
    table.add_row("norm of its gradient", f"{measured.gradient_norm:.4g}", "0 at a minimum")
    return table


def remarks(measured: Measured) -> list[str]:
    """What a reader of a measurement should know and its numbers do not say."""
    found = []
    flat = measured.flatness
    if not measured.eigenvalues.converged:
        found.append("not all eigenvalues have converged: look at the residuals")
    spectrum = measured.eigenvalues
    if min(spectrum.values) < 5 * spectrum.tol * abs(measured.lambda_max):
        found.append(
            "the smallest of these eigenvalues are near the tolerance and not resolved: lower --tol"
        )
    if not measured.trace.converged:
        found.append(
            f"the trace is less exact than was asked for ({100 * measured.trace.rtol:g} %)"
        )
    if not flat.converged:
        found.append("an ascent for R0 or R1 was still gaining when it stopped: both may be larger")
    # In Equation 4's quadratic, R1 is rho times at most the gradient's norm plus rho * lambda_max.
    if measured.gradient_norm > 0.1 * flat.rho * abs(measured.lambda_max):
        found.append(
            "the gradient matters within the radius: these weights are not at a minimum, and there "
            "Eq. 4 does not give λ_max"
        )
    return found


def _plus_minus(spread: Spread) -> str:
    if spread.err is None:
        return f"{spread.mean:.4g}"
    return f"{spread.mean:.4g} ± {spread.err:.2g}"


def find_measured(runs: Sequence[Run]) -> tuple[list[MeasuredRun], list[str]]:
    """The measurements that runs have, and what could not be read."""
    found: list[MeasuredRun] = []
    problems: list[str] = []
    for run in runs:
        # One look at each run, of which there may be many: not by way of another Path.
        if not os.path.isdir(f"{run.path}/{MEASUREMENTS}"):
            continue
        from steppe.training import load_measurements

        try:
            known = load_measurements(run.path)
        except (UserError, OSError) as error:
            problems.append(str(error))
            continue
        found += [MeasuredRun(run, measured) for measured in known.values()]
    return found, problems


def _order(one: MeasuredRun) -> tuple[object, ...]:
    return (*one.run.row.order, *one.run.order, one.measured.name)


def page_rows(found: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """What the page shows of measurements, as plain values, by method."""
    return [
        {
            "run": str(one.run.path),
            "name": one.run.row.name,
            "dataset": one.measured.dataset,
            "measured": one.measured.name,
            "conditions": list(_conditions(one.measured).values()),
            "lambda_max": one.measured.lambda_max,
            "trace": one.measured.trace.value,
            "trace_err": one.measured.trace.stderr,
            "zeroth": one.measured.flatness.zeroth,
            "first": one.measured.flatness.first,
            "fad": one.measured.flatness.fad,
            "rho": one.measured.flatness.rho,
            "alpha": one.measured.flatness.alpha,
            "spectrum": list(one.measured.eigenvalues.values),
        }
        for one in sorted(found, key=_order)
    ]
