"""Ensembles of a sweep's runs: with moving averages, EoA."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from steppe.durable import replace
from steppe.errors import UserError
from steppe.strangers import command, printable
from steppe.training import EnsembleScores, evaluate_ensemble

from .plan import AXES, Sweep
from .store import Job

FILE = "ensembles.json"


@dataclass(frozen=True)
class Ensemble:
    """The finished runs of a sweep that differ only in trial and draw, as one model.

    Attributes:
        axes: what they have in common.
        runs: their names.
        scores: by target domain.
    """

    axes: dict[str, str]
    runs: tuple[str, ...]
    scores: dict[str, EnsembleScores]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        scores = {domain: value.to_json(self.runs) for domain, value in self.scores.items()}
        return {**self.axes, "runs": list(self.runs), "scores": scores}


def ensembles(sweep: Sweep, device: str = "auto") -> Iterator[Ensemble]:
    """Evaluate the ensemble of every target, algorithm, optimizer and averaging.

    All finished runs of all trials and draws take part, each with the weights that were validated
    best, on all images of the targets.
    """
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, axes in sweep.axes.items():
        if Job(sweep.folder(name)).result.exists():
            key = (*(str(axes[axis]) for axis in AXES), str(axes.get("tag", "")))
            groups[key].append(name)
    if not groups:
        look = command("steppe", "sweep", "status", sweep.path)
        raise UserError(f"{sweep.path} has no finished runs yet: see {look}")
    for key, names in groups.items():
        folders = [Job(sweep.folder(name)).result for name in names]
        found = evaluate_ensemble(folders, which="best", device=device)
        yield Ensemble(dict(zip(AXES, key[:-1], strict=True)), tuple(names), found)


def save(sweep: Sweep, found: list[Ensemble]) -> None:
    """Writes them to the sweep's folder."""
    text = json.dumps([ensemble.to_json() for ensemble in found], indent=2) + "\n"
    replace(sweep.path / FILE, text.encode())


def table(found: list[Ensemble]) -> Table:
    """The ensembles for the terminal, next to the mean of their members; in percent."""
    shown = Table(*AXES, "models", "mean member", "ensemble")
    for ensemble in found:
        scores = ensemble.scores.values()
        whole = sum(s.ensemble.accuracy for s in scores) / len(scores)
        members = [m.accuracy for s in scores for m in s.members]
        values = (sum(members) / len(members), whole)
        names = [Text(printable(value)) for value in ensemble.axes.values()]
        shown.add_row(*names, str(len(ensemble.runs)), *(f"{100 * value:.1f}" for value in values))
    return shown
