"""Single-bit flips over the files of a finished sweep, its runs and a pack.

After each flip, what reads the file looks at it. The flip is *told* if there is an error of ours, a
warning or a problem in the report; *harmless* if all is as it was; *silent* if something else came
out without a word; a *traceback* if it was another exception.
"""

import contextlib
import logging
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from steppe.domains import load
from steppe.errors import RunError, UserError
from steppe.reports import build_report, load_runs
from steppe.sweeps import Job, look, read_plan, write_plan
from steppe.sweeps.status import show
from steppe.sweeps.takeover import claim
from steppe.training import RunDirectory, checkpoint

from . import scenarios

OURS = (UserError, RunError, checkpoint.Damaged)
VERDICTS = ("told", "harmless", "SILENT", "TRACEBACK")
_WORDS = re.compile(r"damaged|broken|checksum|unreadable|unknown|not JSON|ignored", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """What a look showed, and what it said is wrong."""

    outcome: Any
    said: frozenset[str] = frozenset()


Look = Callable[[Path], Seen]


def see_sweep(path: Path) -> Seen:
    """The plan, every event, and the status as it is shown."""
    sweep = read_plan(path)
    status = look(sweep)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show(sweep, status))
    events = {
        name: [(e.number, e.kind, e.time, dict(e.facts)) for e in Job(sweep.folder(name)).events()]
        for name in sweep.names
    }
    outcome = [
        dict(sweep.axes),
        sweep.retries,
        dict(sweep.facts),
        events,
        dict(status.counts),
        [(f.name, f.attempts, f.error, f.traceback) for f in status.failures],
    ]
    lines = {line for line in capture.get().splitlines() if _WORDS.search(line)}
    return Seen(outcome, frozenset({*lines, *map(str, getattr(status, "problems", ()))}))


def see_records(path: Path) -> Seen:
    """The records of every run, as runs and their evaluation read them."""
    sweep = read_plan(path)
    records = [RunDirectory(Job(sweep.folder(n)).result).records() for n in sweep.names[:-1]]
    return Seen(records, frozenset())


def see_report(path: Path) -> Seen:
    """The report of all runs."""
    report = build_report(load_runs(path), "train-val", "", "")
    return Seen(report.to_json(), frozenset(report.problems))


def see_checkpoints(path: Path) -> Seen:
    """Every checkpoint of a run, in full."""
    found = []
    for folder in sorted((path / "checkpoint").iterdir()):
        read = checkpoint.load(folder)
        model = {name: tensor.tolist() for name, tensor in read.model.items()}
        found.append((read.step, model, repr(read.state), read.format))
    return Seen(found)


def see_pack(path: Path) -> Seen:
    """The images of a pack and what is known of them."""
    dataset = load(path)
    domains = [
        (d.name, list(map(int, d.labels)), [d.images[i].tobytes() for i in range(len(d))])
        for d in dataset.domains
    ]
    names = [[d.images.name(i) for i in range(len(d))] for d in dataset.domains]
    return Seen([dataset.classes, domains, names, dataset.origin])


@dataclass(frozen=True)
class Group:
    """Files that are flipped, below a folder, and what looks at them."""

    name: str
    root: Path
    pattern: str
    look: Look


def make(base: Path) -> list[Group]:
    """A sweep with two runs that are done and one that failed, and a pack."""
    base.mkdir(parents=True)
    path = base / "sweep"
    sweep = write_plan(_grid(), path)
    words = ("sweep", "work", path, "--device", "cpu", "--limit", "2")
    assert scenarios.run(words, base)[0].code == 0
    job = Job(sweep.folder(sweep.names[-1]))
    for _ in range(2):
        taken = claim(job, job.events())
        assert taken is not None
        taken.fail("ValueError: the fan stopped", "Traceback: none")
    packed = scenarios.Pack(base)
    packed.prepare()
    run = Job(sweep.folder(sweep.names[0])).result
    images = packed.reference / "images"
    return [
        Group("events", path, "runs/*/events/*.json", see_sweep),
        Group("records", path, "runs/*/result/records.jsonl", see_records),
        Group("records, reported", path, "runs/*/result/records.jsonl", see_report),
        Group("sweep.json", path, "sweep.json", see_sweep),
        Group("state.json", run, "checkpoint/*/state.json", see_checkpoints),
        Group("pack index", images, "../images.pack/index.json*", see_pack),
        Group("pack lists", images, "../images.pack/[ab].*", see_pack),
    ]


def _grid() -> Any:
    values = {**vars(scenarios.Work.grid), "targets": "0,45,75"}
    return type(scenarios.Work.grid)(**values)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _hearing() -> Iterator[list[str]]:
    """What is logged as a warning."""
    log, handler = logging.getLogger("steppe"), _Heard()
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        with warnings.catch_warnings(record=True):
            yield handler.lines
    finally:
        log.removeHandler(handler)
        log.propagate = before


def judge(group: Group, expected: Seen) -> tuple[str, str]:
    """What became of a flip, and how it showed."""
    with _hearing() as heard:
        try:
            seen = group.look(group.root)
        except OURS as error:
            return "told", str(error)
        except OSError as error:  # the command line tells it in a line where it names a file
            verdict = "TRACEBACK" if error.filename is None else "told"
            return verdict, repr(error)
        except Exception as error:
            return "TRACEBACK", repr(error)
    if said := [*heard, *(seen.said - expected.said)]:
        return "told", " ".join(said)
    return ("harmless" if _same(seen.outcome, expected.outcome) else "SILENT"), ""


def _same(found: Any, expected: Any) -> bool:
    """Whether two outcomes are equal; a key more than expected is nobody's."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            key in found and _same(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(map(_same, found, expected))
        )
    return type(found) is type(expected) and bool(found == expected)


def flip(path: Path, position: int) -> Callable[[], None]:
    """Flips a bit of a file; returns what puts it back."""
    before, times = path.read_bytes(), path.stat()
    data = bytearray(before)
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)

    def restore() -> None:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return restore


def main(base: Path, flips: int, seed: int) -> bool:
    """Flips, and shows the table; returns whether each was told or harmless."""
    rng = random.Random(seed)
    groups = make(base)
    counts: dict[str, Counter[str]] = {}
    examples = []
    for number, group in enumerate(groups):
        files = sorted(group.root.glob(group.pattern))
        assert files, group
        expected = group.look(group.root)
        counts[group.name] = Counter()
        for _ in range(flips // len(groups) + (number < flips % len(groups))):
            # By file and not by size: a short one counts as much as a long one.
            path = rng.choice(files)
            position = rng.randrange(8 * path.stat().st_size)
            byte = path.read_bytes()[position // 8]
            restore = flip(path, position)
            try:
                verdict, how = judge(group, expected)
            finally:
                restore()
            counts[group.name][verdict] += 1
            if verdict.isupper() and counts[group.name][verdict] <= 5:
                flipped = f"{chr(byte)!r} -> {chr(byte ^ 1 << position % 8)!r}"
                where = f"{path.name}, byte {position // 8}, {flipped}"
                examples.append(f"{group.name}: {verdict}: {where}: {how}")
        assert judge(group, expected)[0] == "harmless"  # all was put back
    print("\n".join(examples))
    print(" ".join([f"{'files':10}", f"{'flips':>9}", *(f"{v:>9}" for v in VERDICTS)]))
    for name, row in counts.items():
        cells = [f"{n:>9,}" for n in (row.total(), *(row[v] for v in VERDICTS))]
        print(" ".join([f"{name:10}", *cells]))
    return not any(row["SILENT"] + row["TRACEBACK"] for row in counts.values())
