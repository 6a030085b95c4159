"""The chosen hyper-parameters, so that others can run them again."""

from __future__ import annotations

from typing import Any

from .runs import Run
from .tables import Runs, select_runs
from .values import plain


def best_configs(runs: Runs, selection: str = "train-val") -> list[dict[str, Any]]:
    """What was chosen for every dataset, method, target and trial.

    Plain values; a number that is not finite is None. ``config`` is what ``steppe train --config``
    takes, in a file of its own.
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
            "choice": chosen.run.choice,
            "step": chosen.step,
            "validation": None if chosen.validation is None else 100 * chosen.validation,
            "accuracy": 100 * chosen.accuracy,
            "hparams": plain(chosen.run.hparams),
            "config": plain(rerunnable(chosen.run)),
        }
        for place in places
        for chosen in (selected.chosen[place],)
    ]


def rerunnable(run: Run) -> dict[str, Any]:
    """A run's config without what belongs to a machine, or to how the run came here."""
    from steppe.training.config import MACHINE, keys  # slow to import

    left_out = keys(MACHINE) | {"imported"}
    return {k: v for k, v in run.config.items() if k not in left_out and v is not None}
