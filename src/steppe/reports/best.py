"""The chosen hyper-parameters, so that others can run them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .runs import Run
from .tables import Runs, select_runs

_OF_A_MACHINE = ("device", "workers", "root", "packed", "loggers")


def best_configs(runs: Runs, selection: str = "train-val") -> list[dict[str, Any]]:
    """What was chosen for every dataset, method, target and trial.

    Args:
        runs: the runs, in any order.
        selection: `train-val`, `leave-one-out` or `oracle`.

    Returns:
        Plain values. ``config`` is what ``steppe train --config`` takes, in a file of its own.
    """
    selected = select_runs(runs, selection)
    places = sorted(selected.chosen, key=lambda p: (p.dataset, p.row.order, p.column, p.trial))
    return [
        {
            "dataset": place.dataset,
            **place.row._asdict(),
            "target": place.column,
            "trial": place.trial,
            "selection": selected.selection,
            "choice": chosen.choice,
            "step": chosen.step,
            "validation": None if chosen.validation is None else 100 * chosen.validation,
            "accuracy": 100 * chosen.accuracy,
            "hparams": dict(chosen.hparams),
            "config": rerunnable(chosen.run),
        }
        for place in places
        for chosen in (selected.chosen[place],)
    ]


def rerunnable(run: Run) -> dict[str, Any]:
    """A run's config without what belongs to a machine, or to how the run came here."""
    left_out = (*_OF_A_MACHINE, "imported")
    return {k: v for k, v in run.config.items() if k not in left_out and v is not None}


def write_best(path: Path, runs: Runs, selection: str = "train-val") -> None:
    """Writes `best_configs` as JSON."""
    text = json.dumps(best_configs(runs, selection), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
