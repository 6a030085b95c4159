"""Train one run in its folder: start or resume it, lock it, keep its state up to date."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from steppe.errors import Interrupted, RunError, UserError

from . import precision
from .complete import make_config
from .config import MACHINE, RunConfig, keys
from .directory import RunDirectory
from .interrupts import Interrupts
from .processes import Processes, join
from .progress import Display
from .second_stage import FirstStage, first_config
from .trainer import Trainer

log = logging.getLogger("steppe")


def train(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Train a run in a folder and return its records.

    Args:
        config: the run.
        out: its folder.
        resume: continue the run in the folder, if there is one; a finished run stays as it is.
        display: where progress goes (default: nowhere).

    Raises:
        UserError: a setting is wrong, so nothing was started; or an image cannot be read.
        RunError: the run stopped, for example because the loss diverged or the disk is full.
        Interrupted: SIGTERM or Ctrl-C; the state was saved.

    Examples:
        >>> import tempfile
        >>> from steppe.training import make_config, train
        >>> config = make_config({"dataset": "RotatedDigits", "targets": "75", "steps": 3})
        >>> records = train(config, tempfile.mkdtemp())
        >>> [record["step"] for record in records]
        [0, 2]
    """
    run = RunDirectory(Path(out))
    with ExitStack() as stack:
        processes = stack.enter_context(join(config.device))
        number_format = precision.resolve(config.precision, processes.device, config.optimizer)
        stack.enter_context(precision.settings(number_format, config.deterministic))
        if processes.first:
            stack.enter_context(lock(run))
            _open(run, config, resume)
            stack.enter_context(run.logging())
        processes.gather(None)  # the others wait until the folder exists
        if resume and run.state == "done":
            log.info("%s is already done", run.path)
            return run.records()
        with _state_of(run, processes):
            first = None
            if config.second_stage:
                records = train(first_config(config), run.first_stage, resume=True, display=display)
                first = FirstStage.of(records)
            with Interrupts() as interrupts, _memory_explained(config):
                trainer = Trainer(config, run, processes, number_format, display, first)
                trainer.run(interrupts)
        return run.records()


def _open(run: RunDirectory, config: RunConfig, resume: bool) -> None:
    """Write the config of a new run, or check that the folder's run has the same config."""
    begun = run.data_file.exists() or run.first_stage.exists()
    if not run.exists() or (run.state == "failed" and not begun):  # nothing to lose
        run.create(config)
        return
    if not resume:
        raise UserError(f"{run.path} already holds a run: add --resume, or choose another --out")
    # Completed, because an older config lacks options that have been added since.
    old, new = make_config(run.config().model_dump()).model_dump(), config.model_dump()
    may_change = keys(MACHINE)
    for key in old:
        if key not in may_change and old[key] != new[key]:
            raise UserError(
                f"{run.path} was started with {key}={old[key]!r}, not {new[key]!r}, and resuming "
                "cannot change it: choose another --out"
            )


@contextmanager
def lock(run: RunDirectory) -> Iterator[None]:
    """Keep two processes from writing one run; the system releases the lock of a dead process."""
    run.path.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_lock(run.path / ".lock"), "r+b", buffering=0) as file:
        try:
            # Not `flock`: image readers would inherit it, and may outlive a killed trainer.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # depends on the system
            raise UserError(f"{run.path} is being trained by another process") from None
        yield


def _open_lock(path: Path) -> int:
    """Open the lock file without following a link, which may lead anywhere."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a link, which steppe never creates: remove it") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a regular file: remove it")
    return descriptor


@contextmanager
def _memory_explained(config: RunConfig) -> Iterator[None]:
    """Turn a failed allocation into an error that says which settings to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not out_of_memory and "can't allocate memory" not in str(error):  # torch on a CPU
            raise
        raise RunError(
            f"out of memory with batch_size={config.batch_size}, image_size={config.image_size} "
            f"and accumulate={config.accumulate}: reduce one of the first two or raise the last, "
            "in another --out"
        ) from error


@contextmanager
def _state_of(run: RunDirectory, processes: Processes) -> Iterator[None]:
    """Keep the `state` file up to date."""
    if not processes.first:
        yield
        return
    run.set_state("running")
    try:
        yield
    except Interrupted as error:
        log.warning("interrupted by %s: continue with --resume", error)
        run.set_state("planned")
        raise
    except Exception as error:
        # For log.txt only: the caller gets the error itself.
        log.debug("failed: %s", error, exc_info=not isinstance(error, UserError | RunError))
        with suppress(RunError):  # a full disk, which must not hide the original error
            run.set_state("failed")
        raise
    except BaseException:  # a second Ctrl-C, or an exit: intended, though nothing was saved
        run.set_state("planned")
        raise
    run.set_state("done")
