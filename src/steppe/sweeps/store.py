"""The job store: files in the runs' folders, safe for many workers on a shared file system.

A run's history is a sequence of numbered events, ``events/00001.json`` and so on. The first process
to create a number's file owns that event. Claiming a run, committing its result, releasing it and
cancelling it all mean creating the next event, so exactly one process succeeds, and processes with
an outdated view fail. Each claim writes to its own folder, ``attempt-00001``, named after the
claim's number. The folder is renamed to ``result`` only if the event right after the claim is
`done`, so a stalled worker that wakes up cannot corrupt anything.

A worker touches a heartbeat file. Without a recent heartbeat it is considered dead, and another
worker claims its run and continues from a copy of its checkpoints.

An event that is unreadable or invalid is `damaged`. It counts as the claim of an unknown worker: it
blocks the run while there are heartbeats, and is ignored after that. A run with a result is done,
even if its `done` event is lost.
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
from steppe.errors import UserError, reason
from steppe.sealed import seal, unseal

if TYPE_CHECKING:
    from steppe.training import RunConfig

STALE_SECONDS = 60.0
"""A worker without a heartbeat for this long is considered dead."""
BEAT_SECONDS = 10.0

RESULT = "result"
COPYING = ".copying"
"""Suffix of an attempt's folder while it is being copied from an earlier attempt."""
DAMAGED = "damaged"
KINDS: Mapping[str, Mapping[str, type]] = {
    "claim": {},
    "done": {"attempt": int},
    "failed": {"error": str, "traceback": str},
    "released": {},
    "cancelled": {},
    "retry": {},
}
"""Kinds of events, with the facts that readers rely on."""
_EVENT = re.compile(r"([0-9]{5}|[1-9][0-9]{5,})\.json")
_AGAIN = "run 'steppe sweep run' again"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Event:
    """An event in a run's history.

    Attributes:
        number: its place in the sequence, from 1.
        kind: `claim`, `done`, `failed`, `released`, `cancelled` or `retry`; or `damaged`, with the
            reason in `facts`.
        time: seconds since 1970, by the writer's clock.
        facts: other entries of its file.
    """

    number: int
    kind: str
    time: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run of a sweep, identified by its folder."""

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
        """The working folder of the claim with this number."""
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
        """The numbers of the existing event files."""
        for folder in (self.path, self.path / "events"):
            if folder.is_symlink():  # a downloaded sweep's link could lead anywhere
                raise UserError(f"{folder} is a symbolic link: replace it with the folder itself")
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
            when = 0.0
            with suppress(OSError):
                when = path.stat().st_mtime
            return Event(number, DAMAGED, when, {"reason": reason(error)})

    def note(self, number: int, kind: str, **facts: Any) -> bool:
        """Create the event with this number; return False if it exists already."""
        folder = self.path / "events"
        folder.mkdir(exist_ok=True)
        text = seal(json.dumps({"kind": kind, "time": time.time(), **facts}))
        target = self.event_file(number)
        temporary = folder / f".{number:05d}.{worker_name()}"
        try:
            with full_disk_explained(target, _AGAIN):
                temporary.write_bytes(text)
            os.link(temporary, target)  # atomic on every file system, with its full content
        except FileExistsError:
            # NFS may report this to the process that created it, if the first reply was lost.
            with suppress(FileNotFoundError):
                return temporary.stat().st_nlink > 1
            return False
        except FileNotFoundError:  # this process stalled, and `tidy` removed the temporary file
            return self.note(number, kind, **facts)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                file = target.open("xb")
            except FileExistsError:
                return False
            with full_disk_explained(target, _AGAIN), file:
                file.write(text)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def alive(self, claim: Event, now: float, stale: float) -> bool:
        """Whether a claim's worker gave a heartbeat within `stale` seconds of file-system time.

        Heartbeats from the future do not count: a clock was wrong, or a backup was restored.
        """
        times = []
        for path in (self.event_file(claim.number), self.attempt(claim.number) / "heartbeat"):
            with suppress(OSError):
                times.append(path.lstat().st_mtime)
        if any(sign >= now + stale for sign in times):
            now = max(now, clock(self.path))  # a caller that surveys many runs passes an old time
        return any(abs(now - sign) < stale for sign in times)

    def settle(self, last: Event | None) -> None:
        """Finish the commit of a worker that died while committing."""
        if last is None or last.kind != "done" or os.path.lexists(self.result):
            return
        attempt = self.attempt(last.facts["attempt"])
        if is_folder(attempt):
            try:
                attempt.rename(self.result)
            except FileNotFoundError:  # another process was faster
                return
            self.clear()

    def has_result(self, done: Event) -> bool:
        """Whether the committed attempt still exists."""
        return self.result.exists() or self.attempt(done.facts["attempt"]).exists()

    def clear(self) -> None:
        """Remove the other attempts of a run that has a result."""
        if is_folder(self.result):
            for pattern in ("attempt-*", f".attempt-*{COPYING}"):
                for other in self.path.glob(pattern):
                    shutil.rmtree(other, ignore_errors=True)  # does not follow links


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _event(number: int, data: bytes) -> Event:
    """Parse an event; ValueError if it is not valid."""
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
    """Messages about a run's damaged events."""
    return [
        f"{job.name}/events/{event.number:05d}.json is damaged: {event.facts['reason']}"
        for event in events
        if event.kind == DAMAGED
    ]


def state_of(job: Job, events: list[Event], now: float, retries: int, stale: float) -> str:
    """The state of a run: `planned`, `running`, `lost`, `done`, `failed` or `cancelled`.

    A failed run that will be retried is `planned`; a run whose worker is silent is `lost`.
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
    """The number of failures since the last `retry`."""
    count = 0
    for event in events:
        count = 0 if event.kind == "retry" else count + (event.kind == "failed")
    return count


def deaths(events: list[Event]) -> int:
    """The number of claims at the end of the history whose workers died without progress."""
    count = 0
    for event in reversed(events):
        if event.kind != "claim" or event.facts.get("step") != events[-1].facts.get("step"):
            break
        count += 1
    return count


def clock(path: Path) -> float:
    """The time by the file system's clock, which all workers share."""
    probe = path / f".clock-{worker_name()}"
    try:
        # Through the open file, because another process may remove the probe.
        with probe.open("wb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno != errno.EROFS and not isinstance(error, PermissionError):
            raise
        return time.time()  # without write permission
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class Claim:
    """A run that this worker owns until another worker takes it over."""

    job: Job
    number: int

    @property
    def folder(self) -> Path:
        return self.job.attempt(self.number)

    def beat(self) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.folder / "heartbeat")

    def held(self) -> bool:
        """Whether no event has followed the claim."""
        return not os.path.lexists(self.job.event_file(self.number + 1))

    def commit(self) -> bool:
        """Make the attempt the result; return False if this worker no longer owns the run."""
        if not self.job.note(self.number + 1, "done", attempt=self.number, worker=worker_name()):
            return False
        self.job.settle(self.job.last())
        return True

    def fail(self, error: str, traceback: str, diverged: bool = False) -> bool:
        """Record a failure; a diverged run is not retried, because it would diverge again."""
        facts = {"error": error, "traceback": traceback, "diverged": diverged}
        return self.job.note(self.number + 1, "failed", attempt=self.number, **facts)

    def release(self) -> bool:
        """Release the run, so that another worker can continue it."""
        return self.job.note(self.number + 1, "released", attempt=self.number)


def worker_name() -> str:
    """This process's name in events.

    Containers may share a host name and a process number; the token distinguishes them.
    """
    return f"{socket.gethostname()}-{os.getpid()}-{_token}"


def _new_token() -> None:
    global _token
    _token = secrets.token_hex(4)


_token = ""
_new_token()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_token)  # a forked child is a different worker
