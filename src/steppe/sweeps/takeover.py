"""Claim a run and continue its earlier attempt, from its folder or from a copy of its intact files.

Unlike the store, this needs torch, to read checkpoints.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from steppe.training import RunDirectory, checkpoint

from . import store
from .store import COPYING, DAMAGED, Claim, Event, Job

log = logging.getLogger("steppe")

_FILES = ("config.json", "data.json", "log.txt", "records.jsonl")


def claim(job: Job, events: list[Event], **facts: Any) -> Claim | None:
    """Claim a run with this history; return None if another worker was faster."""
    number = store.next_number(events)
    claims = [event for event in reversed(events) if event.kind in ("claim", DAMAGED)]
    # Not always the last claim: its worker may have died before it took over an earlier attempt.
    earlier = [event for event in claims if store.is_folder(job.attempt(event.number))]
    facts |= {"worker": store.worker_name(), "host": socket.gethostname(), "pid": os.getpid()}
    facts["step"] = newest_step(job.attempt(earlier[0].number)) if earlier else None
    if not job.note(number, "claim", **facts):
        return None
    taken = Claim(job, number)
    for left_over in job.path.glob(f".attempt-*{COPYING}"):  # by earlier owners
        shutil.rmtree(left_over, ignore_errors=True)
    _remove(taken.folder)  # no worker had this number before, so it is not a worker's
    for event in earlier:
        try:
            take_over(job.attempt(event.number), taken.folder, _gone(event, events))
            break
        except ValueError as error:  # the attempt stays until the run is done
            log.warning("%s: attempt %d cannot be resumed: %s", job.name, event.number, error)
        except FileNotFoundError as error:
            if not taken.held():  # this process stalled, and the new owner removed its copy
                return None
            log.warning("%s: attempt %d is gone: %s", job.name, event.number, error)
    else:
        if earlier:
            log.warning("%s: starting over", job.name)
    if not taken.folder.exists():
        taken.folder.mkdir()
    (taken.folder / "heartbeat").touch()
    return taken


def _remove(path: Path) -> None:
    """Remove a file, a link (but not its target) or a folder."""
    if store.is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _gone(claim: Event, events: list[Event]) -> bool:
    """Whether a claim's worker itself recorded that it stopped.

    A silent worker may wake up, and may not have seen what others recorded, such as a cancellation.
    """
    after = next((event for event in events if event.number == claim.number + 1), None)
    if after is None or after.kind not in ("failed", "released"):
        return False
    return bool(after.facts.get("attempt") == claim.number)


def newest_step(attempt: Path) -> str | None:
    """The newest checkpoint of an attempt, or of its first stage."""
    for folder, above in ((attempt, ""), (RunDirectory(attempt).first_stage, "first stage, ")):
        if steps := sorted(path.name for path in (folder / "checkpoint").glob("step-*")):
            return above + steps[-1]
    return None


def take_over(old: Path, new: Path, gone: bool) -> None:
    """Move or copy an earlier attempt to the folder of a new one.

    Args:
        old: the folder of the earlier attempt.
        new: the folder of the new attempt, which does not exist yet.
        gone: whether the earlier worker has stopped. If not, it may still write, so copy.

    Raises:
        ValueError: the earlier attempt cannot be resumed; it stays as it is.
    """
    _check_files(old)
    if gone:
        _check_run(old)
        old.rename(new)
        return
    copied = new.with_name(f".{new.name}{COPYING}")  # renamed when complete
    shutil.rmtree(copied, ignore_errors=True)
    copied.mkdir()
    try:
        _copy(old, copied)
        _check_run(copied)
    except ValueError:
        shutil.rmtree(copied, ignore_errors=True)
        raise
    copied.rename(new)


def _copy(old: Path, copied: Path) -> None:
    # Its writer may be active: drop partial checkpoints, and copy the records last, because a
    # checkpoint needs all records before it.
    steps = sorted((old / "checkpoint").glob("step-*"), reverse=True)
    whole = 0
    for folder in [*steps, old / "checkpoint" / "best"]:
        copy = copied / "checkpoint" / folder.name
        try:
            shutil.copytree(folder, copy)
            checkpoint.load(copy)
            whole += folder in steps
        except (OSError, shutil.Error, checkpoint.Damaged):
            shutil.rmtree(copy, ignore_errors=True)
    if steps and not whole:
        raise ValueError("every checkpoint is damaged")
    for name in _FILES:
        with suppress(FileNotFoundError):
            shutil.copy2(old / name, copied / name)
    if (first := RunDirectory(old).first_stage).is_dir():
        # Its state too: a first stage that is done stays done.
        (own := RunDirectory(copied).first_stage).mkdir()
        with suppress(FileNotFoundError):
            shutil.copy2(first / "state", own / "state")
        _copy(first, own)


def _check_files(attempt: Path) -> None:
    """Raise an error for links and devices where the run would write; they could lead anywhere."""
    own = [attempt / name for name in (*_FILES, "state", "heartbeat", ".lock", "checkpoint")]
    own.append(first := RunDirectory(attempt).first_stage)
    if store.is_folder(first):
        _check_files(first)
    for path in (*own, *(attempt / "checkpoint").rglob("*")):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path} is not a regular file or folder")


def _check_run(attempt: Path) -> None:
    """Raise an error if the run cannot be resumed."""
    run = RunDirectory(attempt)
    try:
        if run.exists():
            run.config()
        if run.data_file.exists():
            run.data()
        if run.state != "done":
            checkpoint.clean(run.checkpoints)
            last = checkpoint.load_last(run.checkpoints)
            run.cut_records(last.state["records_size"] if last else 0)
        run.records()
        if run.first_stage.exists():
            _check_run(run.first_stage)
    except Exception as error:  # whatever is wrong, the run can start over
        raise ValueError(str(error) or type(error).__name__) from error
