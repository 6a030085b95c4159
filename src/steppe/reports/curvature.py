"""Curvature of runs side by side: the paper's Figure 3 as numbers, and rows for the page."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from steppe.errors import UserError
from steppe.strangers import command, printable

from .runs import MEASUREMENTS, Row, Run

if TYPE_CHECKING:  # slow to import, and most reports have no measurements
    from steppe.measure import Measured

NAMED = 5
"""Runs that a message names."""
SHOWN = 5
"""Eigenvalues that a table shows."""
UNRESOLVED = 0.2
"""A residual above this share of its eigenvalue says little of it."""
ROUNDING = 1e-9
"""An error below this share of its mean is none."""
DISAGREES = 0.1
"""Two values of the largest eigenvalue that differ by more than this share of it are explained."""


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
        err: the standard error over the runs, as in the tables of accuracies (from the population's
            deviation); of a single run, that of its estimate, or None where it has none.
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

    @property
    def zeroth(self) -> Spread:
        """R0, the highest rise of the loss within a radius."""
        return _spread([run.measured.flatness.zeroth for run in self.runs], None)

    @property
    def first(self) -> Spread:
        """R1, the radius times the largest gradient norm within it."""
        return _spread([run.measured.flatness.first for run in self.runs], None)

    @property
    def loss(self) -> Spread:
        """The loss whose curvature it is."""
        return _spread([run.measured.loss for run in self.runs], None)


@dataclass(frozen=True)
class Comparison:
    """Methods whose curvature was measured in the same way."""

    methods: tuple[MethodCurvature, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know and the numbers do not say."""

    @property
    def about(self) -> str:
        """What was measured, in words."""
        found = [one.measured for method in self.methods for one in method.runs]
        averaged = all(measured.weights.averaged for measured in found)
        weights = replace(found[0].weights, averaged=averaged)
        return described(replace(found[0], weights=weights), {one.weights.step for one in found})

    @property
    def rho(self) -> float | None:
        """The radius of the flatness, where all measurements have the same."""
        found = {one.measured.flatness.rho for method in self.methods for one in method.runs}
        return found.pop() if len(found) == 1 else None

    @property
    def errors(self) -> str:
        """What the errors are, in words."""
        counts = [len(method.runs) for method in self.methods]
        if max(counts) == 1:
            return "of the trace's estimate (standard error)"
        if min(counts) > 1:
            return "over runs (standard error)"
        return "over runs (standard error); for a single run, that of its trace's estimate"

    @property
    def legend(self) -> str:
        """What stands below a table."""
        radius = "" if self.rho is None else f"; R0 and R1 within ρ = {self.rho:g}"
        return f"± {self.errors}{radius}"

    @property
    def shown(self) -> dict[str, str]:
        """What methods are compared by, by heading; flatness only where the radius is the same."""
        flat = {} if self.rho is None else {"R0": "zeroth", "R1": "first"}
        return {"λ_max": "lambda_max", "trace": "trace", **flat, "loss": "loss"}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "measured": self.about,
            "errors": self.errors,
            "rho": self.rho,
            "notes": list(self.notes),
            "methods": [
                {
                    **method.row._asdict(),
                    "name": method.row.name,
                    **{name: asdict(getattr(method, name)) for name in self.shown.values()},
                    "spectrum": method.spectrum,
                    "runs": [
                        {
                            "run": str(one.run.path),
                            "step": one.measured.weights.step,
                            "lambda_max": one.measured.lambda_max,
                            "trace": one.measured.trace.value,
                            "zeroth": one.measured.flatness.zeroth,
                            "first": one.measured.flatness.first,
                            "rho": one.measured.flatness.rho,
                            "loss": one.measured.loss,
                            "spectrum": list(one.measured.eigenvalues.values),
                        }
                        for one in method.runs
                    ],
                }
                for method in self.methods
            ],
        }


def compare(
    runs: Sequence[Run],
    domains: Sequence[str] | None = None,
    which: str = "last",
    targets: Sequence[str] | None = None,
) -> Comparison:
    """Put measurements of several runs side by side, by method.

    Args:
        runs: from `load_runs`; every one that is compared must have been measured.
        domains: the domains of the measurements; those that each run was trained on unless given.
        which: the weights that were measured, ``last``, ``best`` or ``step:N``.
        targets: only runs that hold out exactly these; all unless given.
    """
    from steppe.measure import load_measurements
    from steppe.training.which import chosen_step

    chosen_step(which)  # refuses what is no choice
    if targets:
        runs = _holding_out(runs, targets)
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
    methods = tuple(MethodCurvature(row, tuple(by_row[row])) for row in ordered)
    notes = (*_differences(methods), *_unconverged(found), *_radii(found))
    return Comparison(methods, notes)


def _holding_out(runs: Sequence[Run], targets: Sequence[str]) -> list[Run]:
    chosen = [run for run in runs if run.target_set == frozenset(targets)]
    if not chosen:
        known = sorted({", ".join(sorted(run.target_set)) for run in runs})
        raise UserError(
            f"no run has exactly these targets: {', '.join(targets)}. The runs hold out "
            f"{' or '.join(known)}."
        )
    return chosen


def _settings(run: Run) -> dict[str, object]:
    """What may make two runs of one method different, besides chance."""
    own = {key: value for key, value in run.hparams.items() if not key.endswith("seed")}
    backbone = run.config.get("backbone")
    return {"targets": sorted(run.targets), "backbone": backbone, "steps": run.steps, **own}


def _differences(methods: Sequence[MethodCurvature]) -> list[str]:
    notes = []
    for method in methods:
        settings = [_settings(one.run) for one in method.runs]
        names = dict.fromkeys(name for one in settings for name in one)
        differ = [
            name for name in names if any(s.get(name) != settings[0].get(name) for s in settings)
        ]
        if differ:
            listed = ", ".join(differ)
            notes.append(
                f"{method.row.name}: its runs differ in {listed}; the mean is over all of them"
            )
    return notes


def _unconverged(found: Sequence[MeasuredRun]) -> list[str]:
    notes = []
    for what, runs in (
        ("eigenvalues", [one for one in found if not one.measured.eigenvalues.converged]),
        ("the trace", [one for one in found if not one.measured.trace.converged]),
        ("flatness", [one for one in found if not one.measured.flatness.converged]),
    ):
        if runs:
            more = f" and {len(runs) - NAMED:,} more" if len(runs) > NAMED else ""
            listed = ", ".join(str(one.run.path) for one in runs[:NAMED])
            notes.append(
                f"{what} had not converged in {len(runs):,} of {len(found):,} measurements: "
                f"{listed}{more}"
            )
    return notes


def _radii(found: Sequence[MeasuredRun]) -> list[str]:
    radii = sorted({one.measured.flatness.rho for one in found})
    if len(radii) == 1:
        return []
    listed = ", ".join(f"{rho:g}" for rho in radii)
    return [
        f"R0 and R1 are not compared: they were measured at ρ = {listed}. Measure with --rho "
        f"{radii[0]:g} everywhere"
    ]


def _name(known: Mapping[str, Measured], domains: Sequence[str] | None, which: str) -> str:
    """The measurement of these domains, in whatever order they are named."""
    if domains is not None:
        for name, measured in known.items():
            same = {sample.domain for sample in measured.domains} == set(domains)
            if same and measured.weights.which == which:
                return name
    from steppe.measure.stored import measurement_name

    return measurement_name(domains, which)


def _not_measured(missing: Sequence[Path], domains: Sequence[str] | None, which: str) -> str:
    options = [word for name in domains or () for word in ("--domain", name)]
    options += [] if which == "last" else ["--which", which]
    what = f" with {command(*options)}" if options else ""
    listed = "\n".join(f"  {path}" for path in missing[:NAMED])
    more = f"\n  and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
    hint = command("steppe", "curvature", missing[0], *options)
    count = f"{len(missing):,} run{'s were' if len(missing) > 1 else ' was'}"
    return f"{count} not measured{what}:\n{listed}{more}\nMeasure each, for instance: {hint}"


def _conditions(measured: Measured) -> dict[str, object]:
    """What must agree for numbers to be comparable."""
    return {
        "dataset": measured.dataset,
        "domains": ", ".join(f"{s.domain} ({s.part})" for s in measured.domains),
        "images": measured.images,
        "seed of the images": _images_seed(measured),
        "parameters": measured.parameters,
        "weights": measured.weights.which,
        "loss": measured.loss_function,
        "precision": measured.precision,
        "top": len(measured.eigenvalues.values),
    }


def _images_seed(measured: Measured) -> int | str:
    """What decides which images; nothing does where all of them were taken."""
    drawn = any(sample.images < sample.of for sample in measured.domains)
    return measured.seed if drawn else "none (all were taken)"


def _check_alike(found: Sequence[MeasuredRun]) -> None:
    first = found[0]
    ours = _conditions(first.measured)
    for other in found[1:]:
        for what, theirs in _conditions(other.measured).items():
            if theirs != ours[what]:
                advice = "Compare runs with the same sources, measured with the same options"
                if what == "domains" and other.run.target_set != first.run.target_set:
                    advice += f"; {_choose_targets(found)}"
                raise UserError(
                    f"{other.run.path} was measured differently from {first.run.path}: {what} "
                    f"{theirs} and {ours[what]}. {advice}."
                )


def _choose_targets(found: Sequence[MeasuredRun]) -> str:
    """The options that keep as many runs as any choice of targets does."""
    counts = Counter(tuple(sorted(one.run.target_set)) for one in found)
    ((targets, _),) = counts.most_common(1)
    options = command(*(word for name in targets for word in ("--target", name)))
    which = "one target" if len(targets) == 1 else "the same targets"
    return f"choose runs with {which}: {options}"


def _spread(values: Sequence[float], alone: float | None) -> Spread:
    if len(values) == 1:
        return Spread(values[0], alone)
    return Spread(float(np.mean(values)), float(np.std(values) / np.sqrt(len(values))))


def described(measured: Measured, steps: Collection[int] = ()) -> str:
    """What was measured, in words: the loss, the images and the weights.

    Args:
        measured: the measurement, or one of several that were made in the same way.
        steps: of all of them.
    """
    samples = measured.domains
    parts = {"train": "training images", "all": "images"}
    kinds = {sample.part for sample in samples}
    kind = parts[kinds.pop()] if len(kinds) == 1 else "images"
    names = ", ".join(sample.domain for sample in samples)
    after = sorted({*steps, measured.weights.step})
    which = measured.weights.which
    weights = "weights" if which.startswith("step:") else f"{which} weights"
    if len(after) == 1:  # runs may have been validated best at any step
        weights += f" after step {after[0]}"
    if measured.weights.averaged:
        weights += ", averaged"
    return (
        f"{measured.loss_function} on {measured.images:,} {kind} of {names} "
        f"({measured.dataset}); {weights}, {measured.precision}"
    )


def comparison_table(comparison: Comparison) -> Table:
    """A comparison for the terminal."""
    table = Table(title=_title(comparison.about), caption=comparison.legend)
    table.add_column("method", overflow="fold")
    largest, *others = comparison.shown
    for heading in ("runs", largest, f"λ_2 ... λ_{SHOWN}", *others):
        table.add_column(heading, justify="right")
    for method in comparison.methods:
        rest = "  ".join(f"{value:.3g}" for value in method.spectrum[1:SHOWN])
        first, *cells = (_plus_minus(getattr(method, name)) for name in comparison.shown.values())
        name = Text(printable(method.row.name))
        table.add_row(name, str(len(method.runs)), first, rest or "–", *cells)
    return table


def _title(about: str) -> Text:
    return Text(printable(f"Hessian of the {about}"))  # names are neither markup nor orders


def measured_table(measured: Measured) -> Table:
    """A measurement for the terminal."""
    flat, trace, spectrum = measured.flatness, measured.trace, measured.eigenvalues
    table = Table(title=_title(described(measured)))
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
    how = "exact at a minimum of a quadratic"
    table.add_row("λ_max by Eq. 4 from R_FAD", f"{flat.lambda_max:.5g}", how)
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
    pairs = zip(spectrum.values, spectrum.residuals, strict=True)
    if any(residual > UNRESOLVED * abs(value) for value, residual in pairs):
        found.append(
            "some of these eigenvalues are near the tolerance and not resolved: lower --tol"
        )
    if not measured.trace.converged:
        found.append(
            f"the trace is less exact than was asked for ({100 * measured.trace.rtol:g} %)"
        )
    if not flat.converged:
        found.append("an ascent for R0 or R1 was still gaining when it stopped: both may be larger")
    largest = measured.lambda_max
    if abs(flat.lambda_max - largest) > DISAGREES * abs(largest):
        # At a minimum of a quadratic the gradient is 0, and R0 is rho^2 lambda_max / 2.
        found.append(
            f"Eq. 4 gives {flat.lambda_max:.3g} where λ_max is {largest:.3g}: the gradient matters "
            f"within the radius, as these weights are not at a minimum (its norm is "
            f"{measured.gradient_norm:.2g}, ρ λ_max is {flat.rho * largest:.2g}), or the loss is "
            f"no quadratic within ρ (R0 is {flat.zeroth:.2g}, ρ² λ_max / 2 is "
            f"{flat.rho**2 * largest / 2:.2g})"
        )
    return found


def _plus_minus(spread: Spread) -> str:
    """With two digits of the error at least, and as many of the mean."""
    if spread.err is None:
        return f"{spread.mean:.4g}"
    if not ROUNDING * abs(spread.mean) < spread.err < math.inf:
        return f"{spread.mean:.4g} ± {spread.err:.2g}"
    digits = max(0, 1 - math.floor(math.log10(spread.err)))
    return f"{spread.mean:.{digits}f} ± {spread.err:.{digits}f}"


def find_measured(runs: Sequence[Run]) -> tuple[list[MeasuredRun], list[str]]:
    """The measurements that runs have, and what could not be read."""
    found: list[MeasuredRun] = []
    problems: list[str] = []
    for run in runs:
        # One look at each run, of which there may be many: not by way of another Path.
        if not os.path.isdir(f"{run.path}/{MEASUREMENTS}"):
            continue
        from steppe.measure import load_measurements

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
            "images": one.measured.images,
            "loss": one.measured.loss,
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
