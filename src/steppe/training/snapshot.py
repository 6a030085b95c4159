"""Save everything that the next step depends on, and restore it: resuming is bit-exact."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from steppe.errors import UserError

from . import checkpoint, randomness
from .update import take_up

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger("steppe")


def save(trainer: Trainer) -> None:
    """Write a checkpoint after the last update."""
    processes = trainer.processes
    # Each process has its own generators and losses.
    generators = processes.gather(randomness.get_state(trainer.device))
    losses = processes.gather(trainer.losses.state_dict())
    if not processes.first:
        return
    state = {
        "done": trainer.done,
        "looked": trainer.looked,
        "recorded": trainer.recorded,
        "records_size": trainer.dir.records_size(),
        "optimizers": {name: o.state_dict() for name, o in trainer.optimizers.items()},
        "precision": trainer.precision,
        "scaler": trainer.scaler.state_dict() if trainer.scaler else None,
        "averaging": trainer.averaging.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "probe": trainer.probe,
        "best": trainer.recorder.best,
        "losses": losses,
        "generators": generators,
    }
    checkpoint.save(
        trainer.dir.checkpoints, trainer.done - 1, trainer.algorithm.state_dict(), state
    )


def restore(trainer: Trainer) -> None:
    """Restore the last checkpoint, and cut the records back to it."""
    processes = trainer.processes
    if processes.first:
        checkpoint.clean(trainer.dir.checkpoints)
    processes.gather(None)
    found = checkpoint.load_last(trainer.dir.checkpoints)
    if processes.first:
        trainer.dir.cut_records(found.state["records_size"] if found else 0)
    if found is None:
        return
    state = found.state
    if len(state["generators"]) != processes.world:
        raise UserError(
            f"{trainer.dir.path} was trained by {len(state['generators'])} processes and cannot be "
            f"resumed by {processes.world}: start as many as before"
        )
    trainer.algorithm.load_state_dict(found.model)
    for name, optimizer in trainer.optimizers.items():
        take_up(optimizer, state["optimizers"][name])
    if trainer.scaler and state["scaler"] is not None:
        trainer.scaler.load_state_dict(state["scaler"])
    before = state.get("precision", trainer.precision)
    if before != trainer.precision and processes.first:
        said = "%s was trained in %s so far and continues in %s, as precision=auto selects on %s"
        log.warning(said, trainer.dir.path, before, trainer.precision, trainer.device)
    losses = state["losses"]
    if found.format > 1:  # format 1 has no averaging, and losses of the first process only
        trainer.averaging.load_state_dict(state["averaging"])
        trainer.looked = state["looked"]
        losses = losses[processes.rank]
    trainer.schedule.load_state_dict(state.get("schedule", {}))
    trainer.probe = state.get("probe")
    trainer.done, trainer.recorded = state["done"], state["recorded"]
    trainer.recorder.best = state["best"]
    trainer.losses.load_state_dict(losses, trainer.device)
    randomness.set_state(state["generators"][processes.rank], trainer.device)
    log.info("resumed after step %d from %s", found.step, found.path)
