"""From records to tables: runs, selection, tables, and how they are shown.

The names below are the public ones; the modules beside this file hold one idea each.
"""

from .best import best_configs, best_json, write_best
from .curvature import Comparison, MeasuredRun, MethodCurvature, compare
from .domainbed import Imported, import_domainbed
from .render import (
    Grid,
    cost_grid,
    matrix_grid,
    paired_grid,
    table_grid,
    tables_json,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_terminal,
)
from .report import Report, build_report
from .runs import Loaded, Record, Row, Run, load_runs
from .selection import SELECTIONS, Chosen, leave_one_out, oracle, train_validation
from .spectra import draw
from .tables import (
    Cell,
    Cost,
    Matrix,
    Paired,
    Selected,
    Table,
    TableRow,
    Unit,
    across_datasets,
    cost_table,
    dataset_tables,
    optimizer_by_algorithm,
    paired,
    select_runs,
)
from .write import FORMATS, write

__all__ = [
    "FORMATS",
    "SELECTIONS",
    "Cell",
    "Chosen",
    "Comparison",
    "Cost",
    "Grid",
    "Imported",
    "Loaded",
    "Matrix",
    "MeasuredRun",
    "MethodCurvature",
    "Paired",
    "Record",
    "Report",
    "Row",
    "Run",
    "Selected",
    "Table",
    "TableRow",
    "Unit",
    "across_datasets",
    "best_configs",
    "best_json",
    "build_report",
    "compare",
    "cost_grid",
    "cost_table",
    "dataset_tables",
    "draw",
    "import_domainbed",
    "leave_one_out",
    "load_runs",
    "matrix_grid",
    "optimizer_by_algorithm",
    "oracle",
    "paired",
    "paired_grid",
    "select_runs",
    "table_grid",
    "tables_json",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_terminal",
    "train_validation",
    "write",
    "write_best",
]
