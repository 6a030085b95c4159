"""Ensembles of a sweep's runs; with moving averages of weights, this is EoA."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from steppe import console
from steppe.durable import replace
from steppe.errors import UserError
from steppe.strangers import command
from steppe.training import EnsembleScores, evaluate_ensemble

from .store import Job
from .sweep import AXES, Sweep

FILE = "ensembles.json"


@dataclass(frozen=True)
class Ensemble:
    """The ensemble of finished runs that differ only in trial and draw.

    Attributes:
        axes: the settings that its runs share.
        runs: their names.
        scores: for each target domain.
    """

    axes: dict[str, str]
    runs: tuple[str, ...]
    scores: dict[str, EnsembleScores]

    def to_json(self) -> dict[str, Any]:
        scores = {domain: value.to_json(self.runs) for domain, value in self.scores.items()}
        return {**self.axes, "runs": list(self.runs), "scores": scores}


def ensembles(sweep: Sweep, device: str = "auto") -> Iterator[Ensemble]:
    """Evaluate an ensemble for every combination of target, algorithm, optimizer and averaging.

    Each ensemble contains all finished trials and draws, with their best weights by validation, and
    is evaluated on all images of the targets.
    """
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, axes in sweep.axes.items():
        if Job(sweep.folder(name)).result.exists():
            key = (*(str(axes[axis]) for axis in AXES), str(axes.get("tag", "")))
            groups[key].append(name)
    if not groups:
        look = command("steppe", "sweep", "status", sweep.path)
        raise UserError(f"{sweep.path} has no finished runs yet. Check its progress: {look}")
    for key, names in groups.items():
        folders = [Job(sweep.folder(name)).result for name in names]
        found = evaluate_ensemble(folders, which="best", device=device)
        yield Ensemble(dict(zip(AXES, key[:-1], strict=True)), tuple(names), found)


def save(sweep: Sweep, found: list[Ensemble]) -> None:
    text = json.dumps([ensemble.to_json() for ensemble in found], indent=2) + "\n"
    replace(sweep.path / FILE, text.encode())


def table(found: list[Ensemble]) -> console.Table:
    """Accuracies of the ensembles and the mean accuracies of their members, in %."""
    rows = []
    for ensemble in found:
        scores = ensemble.scores.values()
        members = fmean(member.accuracy for score in scores for member in score.members)
        whole = fmean(score.ensemble.accuracy for score in scores)
        values = (f"{100 * value:.1f}" for value in (members, whole))
        rows.append((*ensemble.axes.values(), len(ensemble.runs), *values))
    return console.table((*AXES, "models", "mean member", "ensemble"), rows, labels=len(AXES))
