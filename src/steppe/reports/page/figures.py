"""Data for the page's figures: learning curves and hyperparameter sensitivity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from steppe.reports.runs import Row, Run
from steppe.reports.selection import STEP_RULES, best_step, mean_of, validation_keys
from steppe.reports.tables import Selected, target_names
from steppe.reports.values import finite

POINTS = 2000
"""Maximum number of runs per method in a figure; more are thinned evenly."""


def curves(selected: Selected) -> list[dict[str, Any]]:
    """Learning curves of the selected runs: means over trials, in percent."""
    chosen: dict[tuple[str, str], dict[Row, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for place, found in selected.chosen.items():
        chosen[place.dataset, place.column][place.row].append(found.run)
    return [
        {
            "dataset": dataset,
            "target": column,
            "label": label,
            "series": [_series(row, rows[row]) for row in sorted(rows, key=lambda r: r.order)],
        }
        for dataset, columns in selected.columns.items()
        for column, label in zip(columns, target_names(dataset, columns), strict=True)
        if (rows := chosen.get((dataset, column)))
    ]


def _series(row: Row, runs: Sequence[Run]) -> dict[str, Any]:
    sums: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        keys = {"val": validation_keys(run), "test": [(target, "test") for target in run.targets]}
        for record in run.records:
            loss = record.loss.get("total", record.loss.get("loss"))
            if loss is not None:
                sums["loss", record.step].append(loss)
            for name, parts in keys.items():
                if (accuracy := mean_of(record, parts)) is not None:
                    sums[name, record.step].append(100.0 * accuracy)
    steps = sorted({record.step for run in runs for record in run.records})
    lines = {
        name: [sum(v) / len(v) if (v := sums.get((name, step))) else None for step in steps]
        for name in ("val", "test", "loss")
    }
    return {"name": row.name, "steps": steps, **lines, "runs": len(runs)}


def sensitivity(selected: Selected) -> list[dict[str, Any]]:
    """Accuracy and hyperparameters of every candidate run."""
    # Leave-one-out does not validate single runs, so they use training-domain validation.
    rule = STEP_RULES.get(selected.selection, best_step)
    found = []
    for dataset, sets in selected.columns.items():
        columns = {targets: column for column, targets in sets.items()}
        labels = dict(zip(sets, target_names(dataset, sets), strict=True))
        for row in selected.rows(dataset):
            runs = [r for r in selected.by_method[dataset, row] if r.target_set in columns]
            if len({(run.space, run.choice) for run in runs}) < 2:
                continue
            every = -(-len(runs) // POINTS)
            points = [
                {
                    "choice": run.choice,
                    "trial": run.trial,
                    "target": columns[run.target_set],
                    "label": labels[columns[run.target_set]],
                    "accuracy": 100 * chosen.accuracy,
                    "validation": None if chosen.validation is None else 100 * chosen.validation,
                    "hparams": {k: v for k, v in run.hparams.items() if finite(v)},
                }
                for run in runs[::every]
                if (chosen := rule(run)) is not None
            ]
            found.append({"dataset": dataset, "name": row.name, "every": every, "points": points})
    return found
