"""Writes the tables of the docs from what `benchmarks/defaults.py` measured."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pages import fill

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GUIDE = Path(__file__).parent / "guide"
PAGES = (GUIDE / "defaults-measured.md", GUIDE / "rho-measured.md")

Row = dict[str, list[float | None]]
"""Validation accuracies in percent by learning rate, one for each seed; None: it diverged."""


def stored() -> dict[str, Any]:
    """All studies that have been run, by name."""
    found: dict[str, Any] = {}
    for path in sorted(BENCHMARKS.glob("defaults-*.json")):
        found |= json.loads(path.read_text())["studies"]
    radius = json.loads((BENCHMARKS / "radius-cpu.json").read_text())["studies"]
    return found | {f"radius-{name}": study for name, study in radius.items()}


def default(row: Row) -> str:
    """The default learning rate: factors of it are symmetric."""
    return list(row)[len(row) // 2]


def verdict(row: Row) -> tuple[str, float, float]:
    """The best learning rate of a grid, its lead over the default, and the noise of that lead.

    The noise is two standard errors of the mean of the paired differences between the seeds.
    """
    learned: dict[str, Any] = {lr: values for lr, values in row.items() if None not in values}
    best = max(learned, key=lambda lr: fmean(learned[lr]))
    # A diverged run learned nothing.
    leads = [b - (d or 0.0) for b, d in zip(learned[best], row[default(row)], strict=True)]
    return best, fmean(leads), 2 * stdev(leads) / len(leads) ** 0.5


def table(name: str, found: dict[str, Any]) -> str:
    """A study as Markdown."""
    return radius_table(found) if name.startswith("radius-") else rate_table(found)


def rate_table(rows: dict[str, Row]) -> str:
    lines = [
        "| optimizer | default lr | 1/9 | 1/3 | **1** | 3 | 9 | best minus default |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for optimizer, row in rows.items():
        best, lead, noise = verdict(row)
        cells = [f"**{cell}**" if lr == best else cell for lr, cell in shown(row).items()]
        behind = "0" if best == default(row) else f"{lead:.1f} ± {noise:.1f}"
        columns = [f"`{optimizer}`", f"{float(default(row)):g}", *cells, behind]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def radius_table(found: dict[str, dict[str, Row]]) -> str:
    """One row for each batch size and rho, one column for each learning rate."""
    rates = list(next(iter(next(iter(found.values())).values())))
    lines = [
        f"| images per domain | rho | {' | '.join(f'lr {rate}' for rate in rates)} |",
        "|---|---|" + "---|" * len(rates),
    ]
    for batch, by_rho in found.items():
        for rho, row in by_rho.items():
            lines.append(f"| {batch} | {rho} | {' | '.join(shown(row).values())} |")
    return "\n".join(lines) + "\n"


def shown(row: Row) -> dict[str, str]:
    means = {lr: [v for v in values if v is not None] for lr, values in row.items()}
    return {lr: "diverged" if None in row[lr] else f"{fmean(v):.1f}" for lr, v in means.items()}


if __name__ == "__main__":
    made = {name: table(name, found) for name, found in stored().items()}
    for page in PAGES:
        page.write_text(fill(page.read_text(), made, Path(__file__).name))
