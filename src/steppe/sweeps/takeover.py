"""What an earlier attempt at a run leaves to the next: its folder, or a copy of what is whole."""

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
    """Takes a run, as these events left it; None if another worker was quicker."""
    number = store.next_number(events)
    claims = [event for event in reversed(events) if event.kind in ("claim", DAMAGED)]
    # Not always the last one: a worker may have died before it took over what was there.
    earlier = [event for event in claims if store.is_folder(job.attempt(event.number))]
    facts |= {"worker": store.worker_name(), "host": socket.gethostname(), "pid": os.getpid()}
    facts["step"] = newest_step(job.attempt(earlier[0].number)) if earlier else None
    if not job.note(number, "claim", **facts):
        return None
    taken = Claim(job, number)
    for left_over in job.path.glob(f".attempt-*{COPYING}"):  # by those who had it before
        shutil.rmtree(left_over, ignore_errors=True)
    _remove(taken.folder)  # the number was nobody's so far, so what has its name is not a worker's
    for event in earlier:
        try:
            take_over(job.attempt(event.number), taken.folder, _gone(event, events))
            break
        except ValueError as error:  # it stays there until the run is done
            log.warning("%s: attempt %d cannot be resumed: %s", job.name, event.number, error)
        except FileNotFoundError as error:
            if not taken.held():  # it stalled, and whoever has the run now tidied its copy up
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
    """Removes a file, a link or a folder, whichever it is; what a link leads to stays."""
    if store.is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _gone(claim: Event, events: list[Event]) -> bool:
    """Whether the worker of a claim said itself that it is through.

    One that fell silent may wake up. What others noted after its claim, that it was cancelled for
    example, it may not know yet.
    """
    after = next((event for event in events if event.number == claim.number + 1), None)
    if after is None or after.kind not in ("failed", "released"):
        return False
    return bool(after.facts.get("attempt") == claim.number)


def newest_step(attempt: Path) -> str | None:
    return max((path.name for path in (attempt / "checkpoint").glob("step-*")), default=None)


def take_over(old: Path, new: Path, gone: bool) -> None:
    """Brings what an earlier attempt has to where the new one works.

    Args:
        old: the folder of the earlier attempt.
        new: the folder of the new one, which is not there yet.
        gone: whether the earlier worker is through; otherwise it may be at work.

    Raises:
        ValueError: what is there cannot be resumed, and is left as it is.
    """
    _check_files(old)
    if gone:
        _check_run(old)
        old.rename(new)
        return
    copied = new.with_name(f".{new.name}{COPYING}")  # an attempt is there whole, or not at all
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
    # Its writer may be alive and at work: what is cut off is dropped, and records come last, since
    # a checkpoint needs those before it.
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


def _check_files(attempt: Path) -> None:
    """Refuses links and devices where the run would write: they may lead anywhere."""
    own = [attempt / name for name in (*_FILES, "state", "heartbeat", ".lock", "checkpoint")]
    for path in (*own, *(attempt / "checkpoint").rglob("*")):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path} is not a plain file or folder")


def _check_run(attempt: Path) -> None:
    """Finds out whether a run can go on here, as far as it is still there after its last step."""
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
    except Exception as error:  # whatever is wrong with it, the run can start anew
        raise ValueError(str(error) or type(error).__name__) from error
