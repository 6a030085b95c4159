"""What the soak disturbs, and what must be true afterwards.

A scenario first goes through undisturbed, which gives its reference and the number of its file
operations. Then it goes through again and again with a fault at one of them, is taken up again as
a user would, and compared with the reference.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from steppe.domains import load
from steppe.sweeps import Grid, Job, read_plan, write_plan
from steppe.training import RunDirectory
from steppe.training.directory import VOLATILE

from . import processes
from .injector import COUNT, Fault, Tally
from .processes import Ended

AGE = 3600.0
"""Seconds since the last sign of life of a worker that is dead: nobody needs to wait for it."""


@dataclass
class Verdict:
    """What came of one try.

    Attributes:
        what: the operation that met the fault; empty if the try ended before the fault's turn.
        lost: results that are gone, or that the next try could not make.
        doubled: runs that were committed more than once.
        differs: results that are not those of an undisturbed run, bit for bit.
        badly: errors that were not told in a line.
        junk: what was left behind in the end.
    """

    scenario: str
    fault: Fault
    what: str = ""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    badly: list[str] = field(default_factory=list)
    junk: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether something was lost, doubled or changed."""
        return bool(self.lost or self.doubled or self.differs)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Verdict":
        """From plain values."""
        return cls(**{**values, "fault": Fault(**values["fault"])})


class Scenario(ABC):
    """A command that is disturbed.

    Attributes:
        name: what it is called.
        base: a folder for its reference.
        operations: how many file operations an undisturbed one has.
    """

    name: str

    def __init__(self, base: Path) -> None:
        self.base = base / self.name
        self.reference = self.base / "reference"
        self.operations = 0

    def prepare(self) -> None:
        """Goes through undisturbed."""
        self.base.mkdir(parents=True)
        self.prepare_base()
        tally = Tally(self.base / "tally")
        self.start(self.reference)
        ended = self.disturb(self.reference, COUNT, tally)
        assert all(end.code == 0 for end in ended), ended
        self.operations = tally.read()[0]
        assert self.operations

    def attempt(self, place: Path, fault: Fault) -> Verdict:
        """Goes through with a fault in a new folder, then without one."""
        verdict = Verdict(self.name, fault)
        tally = Tally(place.with_name(f"{place.name}.tally"))
        self.start(place)
        try:
            ended = self.disturb(place, fault, tally)
            _, _, verdict.what = tally.read()
            if not fault.kind.startswith("kill"):
                verdict.badly += [end.told for end in ended if end.told]
            self.look(place, verdict)
            again = self.recover(place)
            verdict.badly += [end.told for end in again if end.told]
            verdict.lost += [f"the next try fails: {e.said[-300:]}" for e in again if e.code]
            self.check(place, verdict)
        except TimeoutError as error:
            verdict.lost.append(str(error))
        return verdict

    def prepare_base(self) -> None:  # noqa: B027  (most need nothing)
        """Makes what all tries need."""

    def start(self, place: Path) -> None:
        """Makes the folder of a try."""
        place.mkdir()

    @abstractmethod
    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        """Runs the command with a fault."""

    def look(self, place: Path, verdict: Verdict) -> None:  # noqa: B027
        """Checks what is there right after the fault."""

    @abstractmethod
    def recover(self, place: Path) -> list[Ended]:
        """Runs the command again; all must succeed."""

    @abstractmethod
    def check(self, place: Path, verdict: Verdict) -> None:
        """Compares what is there in the end with the reference."""


def run(
    words: Sequence[object],
    place: Path,
    fault: Fault | None = None,
    tally: Tally | None = None,
    look: Callable[[], object] = lambda: None,
    copies: int = 1,
) -> list[Ended]:
    """Runs ``steppe WORDS`` in a folder to the end, in so many processes at once."""

    def first() -> None:
        os.chdir(place)
        if fault is not None and tally is not None:
            tally.arm(place, fault)

    logs = {}
    for number in range(copies):
        log = place.with_name(f"{place.name}.{time.monotonic_ns()}.{number}.log")
        logs[processes.fork([str(word) for word in words], log, first)] = log
    codes = processes.wait(look)
    ended = []
    for pid, log in logs.items():
        said = log.read_text(errors="replace") if log.exists() else ""
        ended.append(Ended(codes[pid], said))
        log.unlink(missing_ok=True)
    return ended


def lasting(path: Path) -> list[dict[str, Any]]:
    """The records of a run, less what measures the machine."""
    return [
        {key: value for key, value in record.items() if key not in VOLATILE}
        for record in RunDirectory(path).records()
    ]


def bits(path: Path) -> dict[str, Any]:
    """Every checkpoint of a run: the bytes of its tensors, and the plain values of its state."""
    found: dict[str, Any] = {}
    for folder in (path / "checkpoint").glob("[!.]*"):
        for file in folder.glob("*.safetensors"):
            found[f"{folder.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
        index = json.loads((folder / "state.json").read_bytes())
        state = dict(index.get("state", {"$dict": ()})["$dict"])
        state.pop("records_size", None)  # lines have the times that things took
        found[f"{folder.name}/state"] = (index["step"], state)
    return found


def compare_runs(path: Path, reference: Path, verdict: Verdict) -> None:
    """Whether a run is finished, and ended as another one did."""
    try:
        if RunDirectory(path).state != "done":
            verdict.lost.append(f"{path.name} is {RunDirectory(path).state}")
            return
        if lasting(path) != lasting(reference):
            verdict.differs.append(f"{path.name}: other records")
        found, expected = bits(path), bits(reference)
    except Exception as error:  # whatever it is, the run cannot be used
        verdict.lost.append(f"{path.name}: {error!r}")
        return
    verdict.differs += [f"{path.name}: {n}" for n in expected if found.get(n) != expected[n]]
    verdict.junk += sorted(found.keys() - expected.keys())  # a step that was not removed
    verdict.junk += [junk.name for junk in path.rglob(".*") if junk.name != ".lock"]


class Train(Scenario):
    """`steppe train`, resumed after the fault."""

    name = "train"
    words = (
        *("train", "--dataset", "RotatedDigits", "--target", "75", "--source", "15"),
        *("--optimizer", "adam", "--steps", "5", "--set", "checkpoint_every=2"),
        *("--set", "batch_size=4", "--set", "dropout=0.1", "--device", "cpu", "--out", "run"),
    )

    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        return run(self.words, place, fault, tally)

    def recover(self, place: Path) -> list[Ended]:
        return run((*self.words, "--resume"), place)

    def check(self, place: Path, verdict: Verdict) -> None:
        compare_runs(place / "run", self.reference / "run", verdict)


class Work(Scenario):
    """`steppe sweep work`: one worker or two at once meet the fault, another one follows."""

    name = "work"
    grid = Grid(
        ("RotatedDigits",),
        optimizers=("sgd",),
        trials=1,
        draws=1,
        targets="0,75",
        overrides=("steps=3", "checkpoint_every=1", "batch_size=4", 'sources=["15"]'),
    )
    words: tuple[str, ...] = ("sweep", "work", "sweep", "--device", "cpu")

    def prepare_base(self) -> None:
        write_plan(self.grid, self.base / "plan")

    def start(self, place: Path) -> None:
        place.mkdir()
        shutil.copytree(self.base / "plan", place / "sweep")

    def copies(self, fault: Fault) -> int:
        """How many workers."""
        return 1 + fault.at % 2

    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        ended = run(self.words, place, fault, tally, lambda: self._age(place), self.copies(fault))
        self._age(place)
        return ended

    def recover(self, place: Path) -> list[Ended]:
        return run(self.words, place, look=lambda: self._age(place))

    def _age(self, place: Path) -> None:
        """Lets time pass for the claims of workers that are dead."""
        for path in (place / "sweep" / "runs").glob("*/events/[0-9]*.json"):
            with contextlib.suppress(OSError, ValueError):
                event = json.loads(path.read_bytes())
                past = path.stat().st_mtime < time.time() - AGE / 2
                if event["kind"] != "claim" or past or processes.alive(event["pid"]):
                    continue
                long_ago = time.time() - AGE
                heartbeat = path.parents[1] / f"attempt-{path.stem}" / "heartbeat"
                for sign in (heartbeat, path):
                    if sign.exists():
                        os.utime(sign, (long_ago, long_ago))

    def check(self, place: Path, verdict: Verdict) -> None:
        sweep, reference = read_plan(place / "sweep"), read_plan(self.reference / "sweep")
        for name in reference.names:
            job, expected = Job(sweep.folder(name)), Job(reference.folder(name))
            kinds = [event.kind for event in job.events()]
            if kinds.count("done") > 1:
                verdict.doubled.append(f"{name}: {kinds}")
            if kinds[-1:] != ["done"] or not job.result.exists():
                verdict.lost.append(f"{name}: {kinds}")
                continue
            compare_runs(job.result, expected.result, verdict)
            verdict.junk += [p.name for p in job.path.glob("attempt-*")]
            verdict.junk += [p.name for p in job.path.glob(".*")]
            verdict.junk += [p.name for p in job.path.glob("events/.*")]


class Run(Work):
    """`steppe sweep run`: a launcher and its two workers, and any of them meets the fault."""

    name = "run"
    words = ("sweep", "run", "sweep", "--workers", "2")

    def copies(self, fault: Fault) -> int:
        return 1

    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        ended = super().disturb(place, fault, tally)
        if fault.kind.startswith("kill"):
            return ended
        return [*ended, *self._workers(place)]

    def _workers(self, place: Path) -> list[Ended]:
        """What workers said; not what Python says when a line of a log cannot be written."""
        logs = (place / "sweep" / "workers").glob("*.log")
        said = [log.read_text(errors="replace") for log in logs]
        return [Ended(0, text) for text in said if "--- Logging error ---" not in text]


class Pack(Scenario):
    """`steppe data pack`: the pack appears whole or not at all."""

    name = "pack"
    words: tuple[str, ...] = ("data", "pack", "images", "--size", "8", "--jobs", "1")

    def prepare_base(self) -> None:
        rng = np.random.default_rng(0)
        for domain in "ab":
            for label in "xy":
                folder = self.base / "images" / domain / label
                folder.mkdir(parents=True)
                for number in range(2):
                    pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")

    def start(self, place: Path) -> None:
        place.mkdir()
        shutil.copytree(self.base / "images", place / "images")

    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        return run(self.words, place, fault, tally)

    def recover(self, place: Path) -> list[Ended]:
        return run((*self.words, "--force"), place)

    def allowed(self) -> set[str | None]:
        """What may be there right after the fault: no pack, or the new one."""
        return {None, pack_digest(self.reference)}

    def look(self, place: Path, verdict: Verdict) -> None:
        found = pack_digest(place)
        if found not in self.allowed():
            verdict.lost.append(f"right after the fault: {found or 'no pack'}")

    def check(self, place: Path, verdict: Verdict) -> None:
        found = pack_digest(place)
        if found != pack_digest(self.reference):
            verdict.differs.append(f"the pack: {found}")
        verdict.junk += [path.name for path in place.glob(".*")]


class Repack(Pack):
    """`steppe data pack --force`: the old pack or the new one is there, always."""

    name = "repack"
    words = (*Pack.words, "--force")

    def prepare_base(self) -> None:
        super().prepare_base()
        old = ("data", "pack", "images", "--size", "6", "--jobs", "1")
        assert run(old, self.base)[0].code == 0

    def start(self, place: Path) -> None:
        super().start(place)
        shutil.copytree(self.base / "images.pack", place / "images.pack")

    def allowed(self) -> set[str | None]:
        return {pack_digest(self.base), pack_digest(self.reference)}


def pack_digest(folder: Path) -> str | None:
    """The pixels of a pack; None if there is none, and what is wrong if it cannot be used."""
    log = logging.getLogger("steppe")
    log.addHandler(logging.NullHandler())
    try:
        dataset = load(folder / "images")  # puts back what a killed packer had moved away
        if "pack in" not in dataset.origin:
            return "a pack that is not used" if (folder / "images.pack").exists() else None
        digest = hashlib.sha256(repr(dataset.classes).encode())
        for domain in dataset.domains:
            digest.update(repr((domain.name, list(map(int, domain.labels)))).encode())
            for index in range(len(domain)):
                pixels = domain.images[index]
                digest.update(repr(pixels.shape).encode() + pixels.tobytes())
        return digest.hexdigest()
    except Exception as error:  # whatever it is, the pack cannot be used
        return repr(error)


class Report(Scenario):
    """`steppe report --out`: the old report or the new one is there, whole."""

    name = "report"
    OLD = "the old report\n" * 100

    def prepare_base(self) -> None:
        path = self.base / "sweep"
        write_plan(Work.grid, path)
        assert run(("sweep", "work", path, "--device", "cpu"), self.base)[0].code == 0

    def start(self, place: Path) -> None:
        place.mkdir()
        (place / "report.html").write_text(self.OLD)

    @property
    def words(self) -> tuple[object, ...]:
        """The command."""
        sweep = self.base / "sweep"
        return ("report", sweep, "--format", "html", "--out", "report.html")

    def disturb(self, place: Path, fault: Fault, tally: Tally) -> list[Ended]:
        return run(self.words, place, fault, tally)

    def recover(self, place: Path) -> list[Ended]:
        return run(self.words, place)

    def look(self, place: Path, verdict: Verdict) -> None:
        if self._text(place) not in (self.OLD, self._text(self.reference)):
            size = len(self._text(place))
            verdict.lost.append(f"right after the fault: {size} bytes, neither the old nor the new")

    def check(self, place: Path, verdict: Verdict) -> None:
        if self._text(place) != self._text(self.reference):
            verdict.differs.append("the report")
        verdict.junk += [path.name for path in place.glob(".*")]

    def _text(self, place: Path) -> str:
        path = place / "report.html"
        text = path.read_text(errors="replace") if path.exists() else ""
        return re.sub(r'"made": ?"[^"]*"', '"made":""', text)


SCENARIOS: dict[str, type[Scenario]] = {
    kind.name: kind for kind in (Train, Work, Run, Pack, Repack, Report)
}
