"""The hyperparameters that selection picked for a method, in one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from steppe.errors import shown

from .tables import Selected
from .values import finite_or_none


def chosen_values(selected: Selected, name: str) -> list[str]:
    """Say which values were selected, for every hyperparameter that the method's runs vary."""
    tried: dict[tuple[object, ...], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for run in selected.runs:
        if run.row.name == name:
            for key, value in run.hparams.items():
                tried[run.dataset, run.target_set, run.trial][key].append(value)
    searched = dict.fromkeys(
        key
        for search in tried.values()
        for key, values in search.items()
        if any(value != values[0] for value in values)
    )
    picked = [one.run.hparams for place, one in selected.chosen.items() if place.row.name == name]
    said = [
        f"{key} {_span([hparams[key] for hparams in picked if key in hparams])}"
        for key in searched
        if any(key in hparams for hparams in picked)
    ]
    return [f"Selected for {name}: {', '.join(said)}."] if said else []


def _span(values: Sequence[Any]) -> str:
    """One value, or the range over targets and trials."""
    numbers = [number for value in values if (number := finite_or_none(value)) is not None]
    if len(numbers) < len(values):
        return " or ".join(dict.fromkeys(map(shown, values)))
    low, high = (f"{end:.3g}" for end in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
