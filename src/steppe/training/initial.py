"""Where a run starts: its initial weights, and the runs that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from steppe.algorithms import Algorithm
from steppe.errors import UserError

from . import randomness, setup
from .config import RunConfig
from .directory import RunDirectory
from .served import load_served

_HEAD = "network.classifier."


def initialize(
    config: RunConfig, classes: Sequence[str], channels: int, n_sources: int
) -> Algorithm:
    """Build a run's algorithm with its initial weights.

    They depend on the initial seed, `weights` and `class_embeddings` alone. Weights of a run with
    the same classes include its classifier; without class embeddings, every other classifier is
    random.
    """
    _refuse_leaks(config)
    randomness.seed_all(init_seed(config))
    algorithm = setup.build(config, len(classes), channels, n_sources, classes)
    if (run := head_run(config, classes)) is not None:
        found = load_served(run).tensors
        head = {k.removeprefix(_HEAD): v for k, v in found.items() if k.startswith(_HEAD)}
        try:
            algorithm.network.classifier.load_state_dict(head)
        except RuntimeError:
            raise UserError(
                f"the classifier of {run.path} does not fit {config.algorithm.name}: start from "
                "another run, or from the file that 'steppe export' makes of this one"
            ) from None
    if config.twin:
        with torch.no_grad():
            for weights in algorithm.parameters():
                weights.mul_(1 + config.twin * torch.finfo(weights.dtype).eps)
    return algorithm


def init_seed(config: RunConfig) -> int:
    """The seed of the initial weights."""
    return config.seed if config.init_seed is None else config.init_seed


def lineage(config: RunConfig) -> Iterator[RunDirectory]:
    """The run that `weights` names, the run that this one started from, and so on."""
    seen: set[str] = set()
    while config.weights not in ("none", "imagenet", *seen):
        path = Path(config.weights)
        if not RunDirectory(path).exists():
            return
        seen.add(config.weights)
        yield RunDirectory(path)
        config = RunDirectory(path).config()


def ancestors(config: RunConfig) -> Iterator[RunDirectory]:
    """All runs that shaped the weights that a run starts from, also those that were merged."""
    seen: set[Path] = set()
    left = list(lineage(config))
    while left:
        run = left.pop(0)
        if run.path in seen or not run.exists():
            continue
        seen.add(run.path)
        yield run
        own = run.config()
        left += [*lineage(own), *(RunDirectory(Path(path)) for path in own.merged_from)]


def head_run(config: RunConfig, classes: Sequence[str]) -> RunDirectory | None:
    """The run whose classifier a run starts with; None if it starts with another one."""
    if config.class_embeddings != "none":
        return None
    first = next(lineage(config), None)
    return first if first is not None and first.data()["classes"] == list(classes) else None


def predicts_at_start(config: RunConfig, classes: Sequence[str]) -> bool:
    """Whether a run's initial classifier is not random."""
    given = config.linear_probe or config.class_embeddings != "none"
    return given or head_run(config, classes) is not None


def initial_head(config: RunConfig, classes: Sequence[str]) -> str:
    """Identify a run's initial classifier."""
    if config.linear_probe:
        return "a linear probe"
    if config.class_embeddings != "none":
        return f"that of {config.class_embeddings}"
    run = head_run(config, classes)
    return f"init_seed {init_seed(config)}" if run is None else f"that of {run.path}"


def origin(config: RunConfig) -> str:
    """Identify the weights that a run and all runs before it descend from."""
    *_, first = config, *(run.config() for run in lineage(config))
    return f"none (init_seed {init_seed(first)})" if first.weights == "none" else first.weights


def _refuse_leaks(config: RunConfig) -> None:
    """Reject weights of a run that has seen this run's targets or validation images."""
    for run in ancestors(config):
        other = run.config()
        if other.dataset != config.dataset:
            continue
        sources = run.data()["sources"]
        if held_out := [name for name in config.targets if name in sources]:
            raise UserError(
                f"weights {run.path} were trained on {', '.join(held_out)}, which this run holds "
                "out: choose a run with the same targets"
            )
        if other.second_stage:
            raise UserError(
                f"weights {run.path} were trained on all images, so this run could not be "
                "validated: choose a run without second_stage"
            )
        if (other.split, other.trial_seed) != (config.split, config.trial_seed):
            raise UserError(
                f"weights {run.path} were trained on images that this run validates on: use its "
                f"split, split={other.split} and trial_seed={other.trial_seed}"
            )
