"""Load runs, select models among them, compare methods, and write reports."""

from .columns import Column, register_column
from .curvature import compare
from .differences import paired
from .domainbed import import_domainbed
from .report import Report, best_configs, build_report, write
from .runs import Row, Run, load_runs
from .selection import SELECTIONS
from .spectra import draw
from .tables import (
    across_datasets,
    cost_table,
    dataset_tables,
    optimizer_by_algorithm,
    select_runs,
)

__all__ = [
    "SELECTIONS",
    "Column",
    "Report",
    "Row",
    "Run",
    "across_datasets",
    "best_configs",
    "build_report",
    "compare",
    "cost_table",
    "dataset_tables",
    "draw",
    "import_domainbed",
    "load_runs",
    "optimizer_by_algorithm",
    "paired",
    "register_column",
    "select_runs",
    "write",
]
