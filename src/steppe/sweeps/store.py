"""The store of jobs: files in the runs' folders, safe for many workers on a shared file system.

What happens to a run is a sequence of numbered events, ``events/00001.json``, .... A number can be
taken once: whoever creates its file first has it. To claim a run, to commit its result, to give it
up, to cancel it is to create the next event, so that each of them fails for all but one, and for
everyone whose knowledge is old. The number of a claim is its generation. Each attempt writes in a
folder of its own, ``attempt-00001``, and becomes ``result`` by a rename, after its claim was
followed by `done` and nothing else: a worker that was stalled and wakes up cannot spoil anything.

A worker shows that it is alive by touching a file. One that has not for a while is taken for dead,
and its run is claimed by another one, which goes on from a copy of its checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steppe.training import RunConfig, checkpoint, read_config

STALE_SECONDS = 60.0
"""Without a sign of life for so long, a worker is taken for dead."""
BEAT_SECONDS = 10.0

RESULT = "result"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        number: its place in the sequence, from 1.
        kind: `claim`, `done`, `failed`, `released`, `cancelled` or `retry`.
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
        """What the run is called."""
        return self.path.name

    @property
    def result(self) -> Path:
        """The folder of the finished run."""
        return self.path / RESULT

    def config(self) -> RunConfig:
        """What is to be run."""
        return read_config(self.path / "config.json")

    def attempt(self, number: int) -> Path:
        """The folder in which the claim of that number works."""
        return self.path / f"attempt-{number:05d}"

    def events(self) -> list[Event]:
        """What happened so far, in order."""
        try:
            names = sorted(os.listdir(self.path / "events"))
        except FileNotFoundError:
            return []
        return [self._read(name) for name in names if not name.startswith(".")]

    def _read(self, name: str) -> Event:
        path = self.path / "events" / name
        try:
            facts = json.loads(path.read_bytes())
        except ValueError:  # cut off by a crash, where files cannot be linked: nobody's claim
            facts = {"kind": "released", "time": path.stat().st_mtime}
        return Event(int(name[:-5]), facts.pop("kind"), facts.pop("time"), facts)

    def last(self) -> Event | None:
        """The latest event."""
        try:
            names = [n for n in os.listdir(self.path / "events") if n[0] != "."]
        except FileNotFoundError:
            return None
        return self._read(max(names)) if names else None

    def note(self, number: int, kind: str, **facts: Any) -> bool:
        """Makes something the event of that number; False if there is one already."""
        folder = self.path / "events"
        folder.mkdir(exist_ok=True)
        text = json.dumps({"kind": kind, "time": time.time(), **facts}).encode()
        target = folder / f"{number:05d}.json"
        temporary = folder / f".{number:05d}.{worker_name()}"
        try:
            with checkpoint.full_disk_explained(target):
                temporary.write_bytes(text)
            os.link(temporary, target)  # atomic everywhere, and whole at once
        except FileExistsError:
            # NFS may answer this to the one who made it, when the first answer was lost.
            return temporary.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with target.open("xb") as file:
                    file.write(text)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def signs_of_life(self, claim: Event) -> float:
        """When the worker of a claim was last heard of, by the file system's clock."""
        times = []
        for path in (
            self.path / "events" / f"{claim.number:05d}.json",
            self.attempt(claim.number) / "heartbeat",
        ):
            with suppress(FileNotFoundError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)

    def settle(self, last: Event | None) -> None:
        """Finishes the commit of a worker that died in the middle of one."""
        if last is None or last.kind != "done" or self.result.exists():
            return
        try:
            self.attempt(last.facts["attempt"]).rename(self.result)
        except FileNotFoundError:  # another one was quicker
            return
        for other in self.path.glob("attempt-*"):
            shutil.rmtree(other, ignore_errors=True)


def state_of(job: Job, events: list[Event], now: float, retries: int, stale: float) -> str:
    """What a run is: `planned`, `running`, `lost`, `done`, `failed` or `cancelled`.

    Planned is also one that failed and will be tried again; lost is one whose worker is silent.
    """
    if not events:
        return "planned"
    last = events[-1]
    if last.kind == "claim":
        return "running" if now - job.signs_of_life(last) < stale else "lost"
    if last.kind in ("released", "retry"):
        return "planned"
    if last.kind == "failed":
        again = _failures(events) <= retries and not last.facts.get("diverged")
        return "planned" if again else "failed"
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
        probe.touch()
        os.utime(probe)
        return probe.stat().st_mtime
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
        """Where it works."""
        return self.job.attempt(self.number)

    def beat(self) -> None:
        """Shows that the worker is alive."""
        with suppress(FileNotFoundError):
            os.utime(self.folder / "heartbeat")

    def held(self) -> bool:
        """Whether nothing has happened to the run since it was claimed."""
        return not (self.job.path / "events" / f"{self.number + 1:05d}.json").exists()

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


def claim(job: Job, events: list[Event], **facts: Any) -> Claim | None:
    """Takes a run, as these events left it; None if another worker was quicker."""
    number = events[-1].number + 1 if events else 1
    claims = [event for event in events if event.kind == "claim"]
    # Not always the last one: a worker may have died before it took over what was there.
    earlier = next((e for e in reversed(claims) if job.attempt(e.number).exists()), None)
    facts |= {"worker": worker_name(), "host": socket.gethostname(), "pid": os.getpid()}
    facts["step"] = _newest(job.attempt(earlier.number)) if earlier else None
    if not job.note(number, "claim", **facts):
        return None
    taken = Claim(job, number)
    if earlier:
        _take_over(job.attempt(earlier.number), taken.folder, _gone(earlier, events))
    taken.folder.mkdir(exist_ok=True)
    (taken.folder / "heartbeat").touch()
    return taken


def _newest(attempt: Path) -> str | None:
    """The newest checkpoint of an attempt."""
    return max((path.name for path in (attempt / "checkpoint").glob("step-*")), default=None)


def _gone(claim: Event, events: list[Event]) -> bool:
    """Whether the worker of a claim said itself that it is through.

    One that fell silent may wake up. What others noted after its claim, that it was cancelled for
    example, it may not know yet.
    """
    after = next((event for event in events if event.number == claim.number + 1), None)
    if after is None or after.kind not in ("failed", "released"):
        return False
    return bool(after.facts.get("attempt") == claim.number)


def _take_over(old: Path, new: Path, gone: bool) -> None:
    """Brings what an earlier attempt has to where the new one works."""
    if not old.exists():
        return
    if gone:
        old.rename(new)
        return
    copied = new.with_name(f".{new.name}.copying")  # an attempt is there whole, or not at all
    shutil.rmtree(copied, ignore_errors=True)
    copied.mkdir()
    # Its writer may be alive and at work: what is cut off is dropped, and records come last, since
    # a checkpoint needs those before it.
    steps = sorted((old / "checkpoint").glob("step-*"), reverse=True)
    for folder in [*steps, old / "checkpoint" / "best"]:
        copy = copied / "checkpoint" / folder.name
        try:
            shutil.copytree(folder, copy)
            checkpoint.load(copy)
        except (OSError, shutil.Error, checkpoint.Damaged):
            shutil.rmtree(copy, ignore_errors=True)
    for name in ("config.json", "data.json", "log.txt", "records.jsonl"):
        with suppress(FileNotFoundError):
            shutil.copy2(old / name, copied / name)
    copied.rename(new)


def worker_name() -> str:
    """What this process is called in events."""
    return f"{socket.gethostname()}-{os.getpid()}"
