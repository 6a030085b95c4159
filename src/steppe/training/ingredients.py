"""Which finished runs can be merged in weight space, and what becomes of their settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from steppe.algorithms import Algorithm, algorithm_spec
from steppe.averaging.merging import State
from steppe.domains import import_plugins
from steppe.errors import UserError, unknown

from . import checkpoint, initial, setup
from .config import Named, RunConfig
from .directory import RunDirectory, select, validation_accuracy
from .served import load_served
from .which import Which, chosen_step

HOW: Mapping[str, str] = {"greedy": "greedy-soup", "uniform": "soup", "wise": "wise-ft"}
"""Ways to merge, and the averaging that the result's config names."""
NETWORK = "network."
"""Prefix of the tensors that most algorithms predict with."""


@dataclass(frozen=True)
class Ingredient:
    """A finished run and what its settings say about its weights."""

    path: Path
    config: RunConfig
    data: Mapping[str, Any]
    validation: float | None
    """Validation accuracy of the weights to merge, as the run recorded it."""

    @cached_property
    def facts(self) -> Mapping[str, object]:
        """What runs that are merged must share."""
        config, data = self.config, self.data
        return {
            "dataset": data["dataset"],
            "classes": data["classes"],
            "images": data.get("fingerprint"),
            "targets": sorted(config.targets),
            "training domains": data["sources"],
            "backbone": config.backbone,
            "image_size": config.image_size,
            "freeze_bn": config.freeze_bn,
            "embedding": config.embedding,
            "initial weights": initial.origin(config),
            "initial classifier": initial.initial_head(config, data["classes"]),
        }

    @property
    def predicts_by_network(self) -> bool:
        """Whether predictions need nothing but the network."""
        return algorithm_spec(self.config.algorithm.name).cls.predict is Algorithm.predict

    def build(self, config: RunConfig | None = None) -> Algorithm:
        """The algorithm, without initial weights from elsewhere."""
        start = (config or self.config).model_copy(update=checkpoint.REPLACES)
        data = self.data
        return setup.build(start, len(data["classes"]), data["channels"], len(data["sources"]))


_REMEDIES = {
    "initial classifier": "train runs to be merged with the same --init-seed, from the same "
    "--weights RUN, or all with --linear-probe",
    "initial weights": "train them from the same --weights; from none, with the same --init-seed",
}
_START = ("initial weights", "initial classifier")


def _read(path: Path, which: Which | None) -> Ingredient:
    directory = RunDirectory(path)
    config = directory.config()
    import_plugins(config.plugins)
    if directory.state != "done":
        raise UserError(
            f"{path} is not finished ({directory.state}), so it cannot be merged: leave it out, or "
            "continue it with 'steppe train --resume'"
        )
    records = directory.records()
    if which in (None, "best"):
        record = select(records)
    else:
        step = chosen_step(which)
        known = {record["step"]: record for record in records}
        if not known or step not in (None, *known):
            raise UserError(f"{path} has no record of step {step}: use --which best or last")
        record = known[max(known) if step is None else step]
    return Ingredient(path, config, directory.data(), validation_accuracy(record))


@dataclass(frozen=True)
class Start:
    """WiSE-FT's initial weights.

    Attributes:
        load: loads them, when they are needed.
        path: the run that they come from, if it was named.
        probe: what the run's linear probe chose, which replaces the classifier, if it had one.
    """

    load: Callable[[], State]
    path: Path | None = None
    probe: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Plan:
    """Runs that belong together, and what becomes of them.

    Attributes:
        how: a key of `HOW`.
        runs: in the order in which they are added.
        which: which of their weights.
        config: the new run's, without what merging finds out.
        prefix: which tensors are averaged: those whose names start with it.
        alpha: WiSE-FT's share of the final weights; None searches for it.
        start: WiSE-FT's initial weights.
    """

    how: str
    runs: tuple[Ingredient, ...]
    which: Which | None
    config: RunConfig
    prefix: str
    alpha: float | None = None
    start: Start | None = None


def plan_merge(
    runs: Sequence[str | os.PathLike[str]],
    how: str = "greedy",
    alpha: float | None = None,
    start: str | os.PathLike[str] | None = None,
    which: Which | None = None,
) -> Plan:
    """Check that runs can be merged, from their settings alone; arguments as in `merge_runs`."""
    _check_options(len(runs), how, alpha, start)
    found = [_read(Path(run), which) for run in runs]
    blind = next((one.path for one in found if one.validation is None), None)
    if blind and how != "uniform" and alpha is None:
        remedy = "pass --alpha" if how == "wise" else "use --how uniform"
        raise UserError(f"{blind} has no validation images to choose by: {remedy}")
    if how == "greedy":
        found.sort(key=lambda one: -(one.validation or 0.0))  # stable
    _check_together(found)
    first = found[0]
    if lora := next((one.path for one in found if one.config.lora), None):
        raise UserError(
            f"{lora} trained LoRA's factors, and the mean of their products is not the product of "
            "their means: it cannot be merged"
        )
    prefix = NETWORK if first.predicts_by_network else ""
    begin = _start(first, start) if how == "wise" else None
    return Plan(how, tuple(found), which, _config(found, how), prefix, alpha, begin)


def _check_options(runs: int, how: str, alpha: float | None, start: object) -> None:
    if how not in HOW:
        raise UserError(unknown("way to merge", how, HOW))
    if how == "wise":
        if runs != 1:
            raise UserError(f"wise merges one run with its initial weights, got {runs} runs")
        if alpha is not None and not 0 <= alpha <= 1:
            raise UserError(f"alpha must be between 0 and 1, got {alpha}")
    elif alpha is not None or start is not None:
        raise UserError(f"--alpha and --from belong to --how wise, not to --how {how}")
    elif runs < 2:
        raise UserError(f"merging needs at least two runs, got {runs}")


def _config(runs: Sequence[Ingredient], how: str) -> RunConfig:
    """The first run's config; names that differ are joined."""
    first = runs[0].config
    names = {
        axis: list(dict.fromkeys(getattr(one.config, axis).name for one in runs))
        for axis in ("algorithm", "optimizer", "averaging")
    }
    averages = [name for name in names["averaging"] if name != "none"]
    changes: dict[str, Any] = {
        "averaging": Named(name="+".join([*averages, HOW[how]])),
        "plugins": tuple(dict.fromkeys(name for one in runs for name in one.config.plugins)),
    }
    if len(names["algorithm"]) > 1:
        changes["algorithm"] = Named(name="ERM")  # its network is all that they share
    if len(names["optimizer"]) > 1:
        changes["optimizer"] = Named(name="+".join(sorted(names["optimizer"])))
    if any(one.config.draw != first.draw for one in runs):
        changes["draw"] = None
    return first.model_copy(update=changes)


def _check_together(runs: Sequence[Ingredient]) -> None:
    """Reject runs whose average would be meaningless, or would have seen validation images."""
    first = runs[0]
    paths = [one.path.resolve() for one in runs]
    for one, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{one.path} is listed twice: list each run once")
    for one in runs[1:]:
        _check_facts(one, first)
        _check_algorithms(one, first)
    for one in runs[1:]:
        _check_split(one, first)


def _check_facts(one: Ingredient, first: Ingredient, ignored: Sequence[str] = ()) -> None:
    for what, theirs in one.facts.items():
        ours = first.facts[what]
        if what not in ignored and theirs != ours:
            remedy = _REMEDIES.get(what)
            raise UserError(
                f"{one.path} cannot be merged with {first.path}: different {what} ({theirs} and "
                f"{ours})" + (f". To fix it, {remedy}." if remedy else "")
            )


def _check_algorithms(one: Ingredient, first: Ingredient) -> None:
    names = [run.config.algorithm.name for run in (one, first)]
    if names[0] == names[1]:
        return
    erm = first.config.model_copy(update={"algorithm": Named(name="ERM")})
    plain = repr(first.build(erm).network)
    for run, name in zip((one, first), names, strict=True):
        if not run.predicts_by_network or repr(run.build().network) != plain:
            raise UserError(
                f"{one.path} cannot be merged with {first.path}: {name} changes the network or "
                f"needs more than it to predict, so {names[0]} and {names[1]} do not fit together"
            )


def _check_split(one: Ingredient, first: Ingredient) -> None:
    """Reject another split, unless it is the same (datasets that come split)."""
    keys = ("split", "trial_seed", "second_stage")
    theirs, ours = ({key: getattr(run.config, key) for key in keys} for run in (one, first))
    if ours == theirs:
        return
    both = [setup.open_data(run.config)[1] for run in (one, first)]
    for a, b in zip(*both, strict=True):
        if not np.array_equal(np.sort(a.larger), np.sort(b.larger)):
            differ = [key for key in keys if theirs[key] != ours[key]]
            values = (" and ".join(f"{key}={c[key]}" for key in differ) for c in (theirs, ours))
            raise UserError(
                f"{one.path} cannot be merged with {first.path}: one was trained on validation "
                f"images of the other ({' against '.join(values)})"
            )


def _start(run: Ingredient, start: str | os.PathLike[str] | None) -> Start:
    if start is not None:
        other = _read(Path(start), None)
        _check_facts(other, run, _START)
        _check_algorithms(other, run)
        _check_split(other, run)
        return Start(lambda: load_served(RunDirectory(other.path)).tensors, other.path)
    data = run.data
    if not initial.predicts_at_start(run.config, data["classes"]):
        raise UserError(
            f"{run.path} has no initial weights that predict anything, because its classifier "
            "started random: fine-tune from a linear probe (--linear-probe), from a run with the "
            "same classes (--weights RUN) or from class_embeddings, or name such a run with --from"
        )
    facts = (data["classes"], data["channels"], len(data["sources"]))
    probe = RunDirectory(run.path).records()[0].get("probe")
    return Start(lambda: initial.initialize(run.config, *facts).state_dict(), probe=probe)
