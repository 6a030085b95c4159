"""The weights that a run predicts with: its average if it has one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from steppe.errors import RunError, UserError

from . import checkpoint
from .directory import RunDirectory
from .which import Which, chosen_step


@dataclass(frozen=True)
class Served:
    """Weights of a run.

    Attributes:
        tensors: by the algorithm's names.
        step: the step after which they were saved.
        which: ``best``, ``last`` or ``step:N``.
        averaged: whether they are an average.
        checkpoint: where they come from, for messages.
    """

    tensors: dict[str, Tensor]
    step: int
    which: Which
    averaged: bool
    checkpoint: str


def load_served(directory: RunDirectory, which: Which | None = None) -> Served:
    """Load the weights that a run predicts with.

    Args:
        directory: the run.
        which: ``best``, ``last`` or ``step:N`` (default: ``best``, or ``last`` if there is none).
    """
    if which is None:
        which = "best" if (directory.checkpoints / "best").exists() else "last"
    found = _checkpoint(directory, which)
    # A step checkpoint holds the weights in training, and apart from them the average that the run
    # predicts with. The best checkpoint already holds the average.
    average = found.state.get("averaging", {}).get("served") or {}
    config = directory.config()
    averages = config.averaging.name != "none" and (which == "best" or bool(config.merged_from))
    return Served(
        {**found.model, **average}, found.step, which, bool(average) or averages, str(found.path)
    )


def _checkpoint(directory: RunDirectory, which: Which) -> checkpoint.Checkpoint:
    step = chosen_step(which)
    if which == "best":
        path = directory.checkpoints / "best"
        if not path.exists():
            raise UserError(f"{directory.path} has no best checkpoint: use --which last")
        return checkpoint.load_this(path)
    found = checkpoint.load_chosen(directory.checkpoints, step)
    if found is None:
        raise UserError(f"{directory.path} has no checkpoint yet: continue it with --resume")
    if step is None and directory.state == "done":
        records = directory.records()
        last = records[-1]["step"] if records else found.step
        if last > found.step:
            raise RunError(
                f"{directory.checkpoints} is missing the last checkpoint, after step {last}; "
                + checkpoint.whole_ones(directory.checkpoints)
            )
    return found
