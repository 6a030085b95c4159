"""Compare the curvature of runs: the numbers behind the paper's Figure 3."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from steppe.errors import UserError
from steppe.strangers import command

from .cells import MISSING, standard_error
from .columns import Column, values
from .measured import CURVATURE, SHOWN, MeasuredRun, conditions, described
from .render import TextTable, text_table
from .runs import Row, Run

if TYPE_CHECKING:  # slow to import, and most reports have no measurements
    from steppe.measure import Measured

NAMED = 5
"""Maximum number of runs that a message lists."""
ROUNDING = 1e-9
"""Relative errors below this count as zero."""


class Spread(NamedTuple):
    """A mean over runs and its standard error.

    For a single run, the error is that of its estimate, or None if the estimate has none.
    """

    mean: float
    err: float | None

    def __str__(self) -> str:
        """At least two digits of the error, and as many decimals of the mean."""
        if self.err is None:
            return f"{self.mean:.4g}"
        if not ROUNDING * abs(self.mean) < self.err < math.inf:
            return f"{self.mean:.4g} ± {self.err:.2g}"
        digits = max(0, 1 - math.floor(math.log10(self.err)))
        return f"{self.mean:.{digits}f} ± {self.err:.{digits}f}"


@dataclass(frozen=True)
class MethodCurvature:
    """Measurements of one method's runs."""

    row: Row
    runs: tuple[MeasuredRun, ...]

    @property
    def spectra(self) -> list[tuple[float, ...]]:
        """The eigenvalues of each run, largest first."""
        return [run.measured.eigenvalues.values for run in self.runs]

    @property
    def spectrum(self) -> list[float]:
        """The mean over runs at each rank."""
        return [float(value) for value in np.mean(self.spectra, axis=0)]

    def spread(self, key: str) -> Spread:
        """Mean and error over runs of a column of `CURVATURE`."""
        found = [values(CURVATURE, run)[key] for run in self.runs]
        if len(found) == 1:
            return Spread(found[0], self.runs[0].measured.trace.stderr if key == "trace" else None)
        return Spread(float(np.mean(found)), standard_error(found))


@dataclass(frozen=True)
class Comparison:
    """Methods whose curvature was measured under the same conditions."""

    methods: tuple[MethodCurvature, ...]
    notes: tuple[str, ...] = ()
    """Caveats for the reader."""

    @property
    def _measured(self) -> list[Measured]:
        return [one.measured for method in self.methods for one in method.runs]

    @property
    def about(self) -> str:
        """What was measured, in words."""
        found = self._measured
        averaged = all(measured.weights.averaged for measured in found)
        weights = replace(found[0].weights, averaged=averaged)
        return described(replace(found[0], weights=weights), {one.weights.step for one in found})

    @property
    def rho(self) -> float | None:
        """The radius of the flatness measures; None if measurements differ in it."""
        radii = {measured.flatness.rho for measured in self._measured}
        return radii.pop() if len(radii) == 1 else None

    @property
    def errors(self) -> str:
        """What the error bars show, in words."""
        counts = [len(method.runs) for method in self.methods]
        if max(counts) == 1:
            return "standard error of the trace estimate"
        single = "; for a single run, that of its trace estimate" if min(counts) == 1 else ""
        return f"standard error over runs{single}"

    @property
    def shown(self) -> list[Column[MeasuredRun]]:
        """Columns to compare methods by; flatness only if all radii are equal."""
        left_out = ("zeroth", "first") if self.rho is None else ()
        return [c for c in CURVATURE if c.heading and c.key not in left_out]

    def to_json(self) -> dict[str, Any]:
        return {
            "measured": self.about,
            "errors": self.errors,
            "rho": self.rho,
            "notes": list(self.notes),
            "methods": [
                {
                    **method.row._asdict(),
                    "name": method.row.name,
                    **{c.key: method.spread(c.key)._asdict() for c in self.shown},
                    "spectrum": method.spectrum,
                    "runs": [
                        {
                            "run": str(one.run.path),
                            "step": one.measured.weights.step,
                            **values(CURVATURE, one),
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
    """Compare the curvature measurements of several runs, by method.

    Args:
        runs: from `load_runs`; all of them must have been measured.
        domains: domains of the measurements (default: each run's training domains).
        which: the weights that were measured: ``last``, ``best`` or ``step:N``.
        targets: compare only runs that hold out exactly these domains (default: all runs).
    """
    from steppe.measure import load_measurements
    from steppe.training.which import chosen_step

    chosen_step(which)  # raises an error if `which` is invalid
    found, missing = [], []
    for run in _holding_out(runs, targets) if targets else runs:
        measured = _chosen(load_measurements(run.path), domains, which)
        if measured is None:
            missing.append(run.path)
        else:
            found.append(MeasuredRun(run, measured))
    if missing:
        raise UserError(_not_measured(missing, domains, which))
    if len(found) < 2:
        raise UserError(f"a comparison needs at least two runs, got {len(found)}")
    _check_alike(found)
    by_row: dict[Row, list[MeasuredRun]] = defaultdict(list)
    for one in found:
        by_row[one.run.row].append(one)
    ordered = sorted(by_row, key=lambda row: row.order)
    methods = tuple(MethodCurvature(row, tuple(by_row[row])) for row in ordered)
    return Comparison(methods, (*_differences(methods), *_cautions(found)))


def _holding_out(runs: Sequence[Run], targets: Sequence[str]) -> list[Run]:
    chosen = [run for run in runs if run.target_set == frozenset(targets)]
    if not chosen:
        known = sorted({", ".join(sorted(run.target_set)) for run in runs})
        raise UserError(
            f"no run has exactly the targets {', '.join(targets)}; the runs hold out "
            f"{' or '.join(known)}"
        )
    return chosen


def _chosen(
    known: Mapping[str, Measured], domains: Sequence[str] | None, which: str
) -> Measured | None:
    """The measurement of these domains, in any order."""
    from steppe.measure.stored import measurement_name

    if domains is None:
        return known.get(measurement_name(None, which))
    for measured in known.values():
        same = {sample.domain for sample in measured.domains} == set(domains)
        if same and measured.weights.which == which:
            return measured
    return None


def _not_measured(missing: Sequence[Path], domains: Sequence[str] | None, which: str) -> str:
    options = [word for name in domains or () for word in ("--domain", name)]
    options += [] if which == "last" else ["--which", which]
    what = f" with {command(*options)}" if options else ""
    listed = "\n".join(f"  {path}" for path in missing[:NAMED])
    more = f"\n  and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
    hint = command("steppe", "curvature", missing[0], *options)
    count = f"{len(missing):,} run{'s were' if len(missing) > 1 else ' was'}"
    return f"{count} not measured{what}:\n{listed}{more}\nMeasure each of them, for example: {hint}"


def _check_alike(found: Sequence[MeasuredRun]) -> None:
    first = found[0]
    ours = conditions(first.measured)
    for other in found[1:]:
        for what, theirs in conditions(other.measured).items():
            if theirs != ours[what]:
                advice = "Compare runs with the same sources, measured with the same options"
                if what == "domains" and other.run.target_set != first.run.target_set:
                    advice += f"; {_choose_targets(found)}"
                raise UserError(
                    f"{other.run.path} was measured differently from {first.run.path} ({what}: "
                    f"{theirs} instead of {ours[what]}). {advice}."
                )


def _choose_targets(found: Sequence[MeasuredRun]) -> str:
    """The options that select the most common targets."""
    counts = Counter(tuple(sorted(one.run.target_set)) for one in found)
    ((targets, _),) = counts.most_common(1)
    options = command(*(word for name in targets for word in ("--target", name)))
    which = "one target" if len(targets) == 1 else "the same targets"
    return f"choose runs with {which}: {options}"


def _differences(methods: Sequence[MethodCurvature]) -> list[str]:
    """Settings that differ between the runs of one method."""
    notes = []
    for method in methods:
        settings = [
            {
                "targets": sorted(run.targets),
                "backbone": run.config.get("backbone"),
                "steps": run.steps,
                **{key: value for key, value in run.hparams.items() if not key.endswith("seed")},
            }
            for run in (one.run for one in method.runs)
        ]
        names = dict.fromkeys(name for one in settings for name in one)
        differ = [n for n in names if any(s.get(n) != settings[0].get(n) for s in settings)]
        if differ:
            listed = ", ".join(differ)
            notes.append(f"{method.row.name}: mean over runs that differ in {listed}")
    return notes


def _cautions(found: Sequence[MeasuredRun]) -> list[str]:
    """Measurements that did not converge or used different radii."""
    notes = []
    parts = {"eigenvalues": "eigenvalues", "trace": "the trace", "flatness": "flatness"}
    for part, what in parts.items():
        runs = [one.run.path for one in found if not getattr(one.measured, part).converged]
        if runs:
            more = f" and {len(runs) - NAMED:,} more" if len(runs) > NAMED else ""
            notes.append(
                f"{what} did not converge in {len(runs):,} of {len(found):,} measurements: "
                f"{', '.join(map(str, runs[:NAMED]))}{more}"
            )
    radii = sorted({one.measured.flatness.rho for one in found})
    if len(radii) > 1:
        listed = ", ".join(f"{rho:g}" for rho in radii)
        notes.append(
            f"R0 and R1 are not compared, because they were measured at ρ = {listed}. Measure all "
            f"runs with --rho {radii[0]:g}"
        )
    return notes


def comparison_text(comparison: Comparison) -> TextTable:
    """The leading eigenvalues and the trace of each method's Hessian."""

    def spread(column: Column[MeasuredRun]) -> Column[MethodCurvature]:
        return Column("", column.heading, lambda method: str(method.spread(column.key)))

    def others(method: MethodCurvature) -> str:
        return "  ".join(f"{value:.3g}" for value in method.spectrum[1:SHOWN]) or MISSING

    largest, *rest = map(spread, comparison.shown)
    columns: list[Column[MethodCurvature]] = [
        Column("", "method", lambda method: method.row.name, word=True),
        Column("", "runs", lambda method: len(method.runs)),
        largest,
        Column("", f"λ_2 ... λ_{SHOWN}", others),
        *rest,
    ]
    radius = "" if comparison.rho is None else f"; R0 and R1 within ρ = {comparison.rho:g}"
    note = f"±: {comparison.errors}{radius}"
    return text_table(f"Hessian of the {comparison.about}", columns, comparison.methods, note=note)
