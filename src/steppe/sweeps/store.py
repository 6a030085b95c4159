"""The store of jobs: files in the runs' folders, safe for many workers on a shared file system.

What happens to a run is a sequence of numbered events, ``events/00001.json``, .... A number can be
taken once: whoever creates its file first has it. To claim a run, to commit its result, to give it
up, to cancel it is to create the next event, so that each of them fails for all but one, and for
everyone whose knowledge is old. The number of a claim is its generation. Each attempt writes in a
folder of its own, ``attempt-00001``, and becomes ``result`` by a rename, after its claim was
followed by `done` and nothing else: a worker that was stalled and wakes up cannot spoil anything.

A worker shows that it is alive by touching a file. One that has not for a while is taken for dead,
and its run is claimed by another one, which goes on from a copy of its checkpoints.

An event that cannot be read, or that nobody could have written, is `damaged`. It is taken for a
claim by somebody unknown: waited for while there are signs of life, passed over after that. A run
that has a result is done, whatever became of the event that said so.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe import strangers
from steppe.durable import full_disk_explained
from steppe.errors import UserError
from steppe.sealed import seal, unseal

if TYPE_CHECKING:
    from steppe.training import RunConfig

STALE_SECONDS = 60.0
"""Without a sign of life for so long, a worker is taken for dead."""
BEAT_SECONDS = 10.0

RESULT = "result"
COPYING = ".copying"
"""Ends the name of an attempt while it is copied from another one."""
DAMAGED = "damaged"
KINDS: Mapping[str, Mapping[str, type]] = {
    "claim": {},
    "done": {"attempt": int},
    "failed": {"error": str, "traceback": str},
    "released": {},
    "cancelled": {},
    "retry": {},
}
"""What can happen to a run, and the facts that others rely on."""
_EVENT = re.compile(r"([0-9]{5}|[1-9][0-9]{5,})\.json")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        number: its place in the sequence, from 1.
        kind: `claim`, `done`, `failed`, `released`, `cancelled` or `retry`; or `damaged`, with the
            reason among its facts.
        time: when, in seconds since 1970, by the clock of whoever noted it.
        facts: more about it.
    """

    number: int
    kind: str
    time: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run of a sweep, as its folder shows it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def result(self) -> Path:
        return self.path / RESULT

    def config(self) -> RunConfig:
        from steppe.training import read_config

        return read_config(self.path / "config.json")

    def attempt(self, number: int) -> Path:
        """The folder in which the claim of that number works."""
        return self.path / f"attempt-{number:05d}"

    def events(self) -> list[Event]:
        found: list[Event] = []
        for number in sorted(self._numbers()):
            event = self._read(number)
            missing = found[-1].number + 1 if found else 1
            if number > missing:
                found.append(Event(missing, DAMAGED, event.time, {"reason": "it is missing"}))
            found.append(event)
        return found

    def last(self) -> Event | None:
        number = max(self._numbers(), default=None)
        return None if number is None else self._read(number)

    def event_file(self, number: int) -> Path:
        return self.path / "events" / f"{number:05d}.json"

    def _numbers(self) -> Iterator[int]:
        """The numbers that are taken; files that are not called like events are none."""
        for folder in (self.path, self.path / "events"):
            if folder.is_symlink():  # whoever made the sweep may have it lead anywhere
                raise UserError(f"{folder} is a link: put the folder itself there")
        try:
            names = os.listdir(self.path / "events")
        except FileNotFoundError:
            return
        for name in names:
            if found := _EVENT.fullmatch(name):
                yield int(found[1])

    def _read(self, number: int) -> Event:
        path = self.event_file(number)
        try:
            return _event(number, strangers.read(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            with suppress(OSError):
                return Event(number, DAMAGED, path.stat().st_mtime, {"reason": str(reason)})
            return Event(number, DAMAGED, 0.0, {"reason": str(reason)})

    def note(self, number: int, kind: str, **facts: Any) -> bool:
        """Makes something the event of that number; False if there is one already."""
        folder = self.path / "events"
        folder.mkdir(exist_ok=True)
        text = seal(json.dumps({"kind": kind, "time": time.time(), **facts}))
        target = self.event_file(number)
        temporary = folder / f".{number:05d}.{worker_name()}"
        try:
            with full_disk_explained(target):
                temporary.write_bytes(text)
            os.link(temporary, target)  # atomic everywhere, and whole at once
        except FileExistsError:
            # NFS may answer this to the one who made it, when the first answer was lost.
            with suppress(FileNotFoundError):
                return temporary.stat().st_nlink > 1
            return False
        except FileNotFoundError:  # it stalled, and the temporary was tidied up
            return self.note(number, kind, **facts)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                file = target.open("xb")
            except FileExistsError:
                return False
            with full_disk_explained(target), file:
                file.write(text)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def alive(self, claim: Event, now: float, stale: float) -> bool:
        """Whether the worker of a claim was heard of, by the file system's clock, within `stale`.

        A sign of life from the future is none: a clock was wrong, or a backup was put back.
        """
        times = []
        for path in (self.event_file(claim.number), self.attempt(claim.number) / "heartbeat"):
            with suppress(OSError):
                times.append(path.lstat().st_mtime)
        if any(sign >= now + stale for sign in times):
            now = max(now, clock(self.path))  # whoever looks at many runs has an old one
        return any(abs(now - sign) < stale for sign in times)

    def settle(self, last: Event | None) -> None:
        """Finishes the commit of a worker that died in the middle of one."""
        if last is None or last.kind != "done" or os.path.lexists(self.result):
            return
        attempt = self.attempt(last.facts["attempt"])
        if is_folder(attempt):
            try:
                attempt.rename(self.result)
            except FileNotFoundError:  # another one was quicker
                return
            self.clear()

    def has_result(self, done: Event) -> bool:
        """Whether what was committed is still there."""
        return self.result.exists() or self.attempt(done.facts["attempt"]).exists()

    def clear(self) -> None:
        """Removes the attempts beside a result."""
        if is_folder(self.result):
            for pattern in ("attempt-*", f".attempt-*{COPYING}"):
                for other in self.path.glob(pattern):
                    shutil.rmtree(other, ignore_errors=True)  # which removes no link


def is_folder(path: Path) -> bool:
    """Whether it is a folder itself, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _event(number: int, data: bytes) -> Event:
    """Reads an event; ValueError says why it is none."""
    facts = unseal(data)
    kind, when = facts.pop("kind", None), facts.pop("time", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{kind!r:.60} is not a kind of event")
    if not isinstance(when, int | float) or not abs(when) < 1e12:  # also NaN
        raise ValueError(f"{when!r:.60} is not a time")
    for key, expected in KINDS[kind].items():
        if not isinstance(facts.get(key), expected):
            raise ValueError(f"{key} of {kind!r} is {facts.get(key)!r:.60}")
    if kind == "done" and facts["attempt"] != number - 1:
        raise ValueError(f"it commits attempt {facts['attempt']!r:.60}, not {number - 1}")
    return Event(number, kind, float(when), facts)


def next_number(events: list[Event]) -> int:
    return events[-1].number + 1 if events else 1


def damage(job: Job, events: list[Event]) -> list[str]:
    """What is wrong with the events of a run, to be told."""
    return [
        f"{job.name}/events/{event.number:05d}.json is damaged: {event.facts['reason']}"
        for event in events
        if event.kind == DAMAGED
    ]


def state_of(job: Job, events: list[Event], now: float, retries: int, stale: float) -> str:
    """What a run is: `planned`, `running`, `lost`, `done`, `failed` or `cancelled`.

    Planned is also one that failed and will be tried again; lost is one whose worker is silent.
    """
    if not events:
        return "planned"
    last = events[-1]
    if last.kind == "claim":
        return "running" if job.alive(last, now, stale) else "lost"
    if last.kind == DAMAGED:
        if job.result.is_dir():
            return "done"
        return "running" if job.alive(last, now, stale) else "planned"
    if last.kind in ("released", "retry"):
        return "planned"
    if last.kind == "failed":
        again = _failures(events) <= retries and not last.facts.get("diverged")
        return "planned" if again else "failed"
    if last.kind == "done" and not job.has_result(last):
        return "failed"
    return last.kind


def _failures(events: list[Event]) -> int:
    """How often the run failed since it was last told to start over."""
    count = 0
    for event in events:
        count = 0 if event.kind == "retry" else count + (event.kind == "failed")
    return count


def deaths(events: list[Event]) -> int:
    """How many claims in a row, up to the last event, ended without a word and without progress."""
    count = 0
    for event in reversed(events):
        if event.kind != "claim" or event.facts.get("step") != events[-1].facts.get("step"):
            break
        count += 1
    return count


def clock(path: Path) -> float:
    """The time by the clock of the file system, which all workers share."""
    probe = path / f".clock-{worker_name()}"
    try:
        # Through the open file: others may tidy it up.
        with probe.open("wb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno != errno.EROFS and not isinstance(error, PermissionError):
            raise
        return time.time()  # of someone who may only look
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class Claim:
    """A run that is this worker's to carry out, for as long as nobody takes it over."""

    job: Job
    number: int

    @property
    def folder(self) -> Path:
        return self.job.attempt(self.number)

    def beat(self) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.folder / "heartbeat")

    def held(self) -> bool:
        """Whether nothing has happened to the run since it was claimed."""
        return not os.path.lexists(self.job.event_file(self.number + 1))

    def commit(self) -> bool:
        """Makes the attempt the result; False if the run is no longer this worker's."""
        if not self.job.note(self.number + 1, "done", attempt=self.number, worker=worker_name()):
            return False
        self.job.settle(self.job.last())
        return True

    def fail(self, error: str, traceback: str, diverged: bool = False) -> bool:
        """Notes that the attempt failed; if it diverged, another one would too, and is not made."""
        facts = {"error": error, "traceback": traceback, "diverged": diverged}
        return self.job.note(self.number + 1, "failed", attempt=self.number, **facts)

    def release(self) -> bool:
        """Gives the run back; the next one goes on from where it is."""
        return self.job.note(self.number + 1, "released", attempt=self.number)


def worker_name() -> str:
    """What this process is called in events.

    Containers may share the host's name, and each has a process 1: the token tells them apart.
    """
    return f"{socket.gethostname()}-{os.getpid()}-{_token}"


def _new_token() -> None:
    global _token
    _token = secrets.token_hex(4)


_token = ""
_new_token()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_token)  # a child is another worker, whatever its pid
