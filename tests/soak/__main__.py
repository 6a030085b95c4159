"""Disturbs commands at their file operations, for as long as it is told; see CONTRIBUTING.md."""

import argparse
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from . import injector
from .injector import Fault

KINDS = (
    *("kill:before", "kill:after", "kill:half") * 2,
    *("fail:EIO", "fail:ENOSPC", "fail:EDQUOT", "fail:EMFILE", "short", "full"),
)
"""Half of the faults are kills."""
COLUMNS = {"kill": "kills", "fail": "failures", "short": "short writes", "full": "full disks"}
SAY_SECONDS = 10.0


def parse() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=float, help="how long (default: 10)")
    how_long.add_argument("--faults", type=int, help="how many faults of each scenario instead")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time (default: 2)")
    parser.add_argument(
        "--only",
        action="append",
        choices=("train", "work", "run", "pack", "repack", "report", "flips"),
        help="only this scenario; may be repeated",
    )
    parser.add_argument("--flips", type=int, default=2000, help="single-bit flips (default: 2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict here")
    return parser.parse_args()


def preload() -> Path:
    """Makes the folder of the soak, and starts this program anew with the injector loaded."""
    if given := os.environ.get("SOAK_FOLDER"):
        return Path(given)
    if injector.compiler() is None:
        sys.exit("soak: a C compiler is needed (cc, or $CC)")
    base = Path(tempfile.mkdtemp(prefix="steppe-soak-")).resolve()
    changes = {
        "SOAK_FOLDER": str(base),
        "LD_PRELOAD": str(injector.build(base)),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "tests.soak", *sys.argv[1:]]
    return os.execve(sys.executable, words, {**os.environ, **changes})


def faults(operations: int, rng: random.Random) -> Iterator[Fault]:
    """Every operation in some order, each time with another kind, without an end."""
    kinds = list(KINDS)
    while True:
        rng.shuffle(kinds)
        order = rng.sample(range(1, operations + 1), operations)
        for number, at in enumerate(order):
            yield Fault(kinds[number % len(kinds)], at)


def main() -> None:
    """Prepares the scenarios, tries, and shows what came of it."""
    asked = parse()
    base = preload()
    chosen = asked.only or ["train", "work", "run", "pack", "repack", "report"]
    from . import processes
    from .scenarios import SCENARIOS, Scenario, Verdict

    # What every child would import by itself. (A backward pass here would be felt in the children.)
    for module in (
        *("torch._dynamo", "steppe.reports", "steppe.domains.packing"),
        *("steppe.training.progress", "steppe.sweeps.launch", "steppe.sweeps.local"),
    ):
        import_module(module)
    processes.adopt()
    processes.hurry()
    # What is there by now stays shared with the children: their collectors leave it alone.
    gc.collect()
    gc.freeze()

    scenarios: dict[str, Scenario] = {}
    for name in chosen:
        if name in SCENARIOS:
            scenarios[name] = SCENARIOS[name](base)
            scenarios[name].prepare()
            print(f"{name}: {scenarios[name].operations:,} file operations", flush=True)
    verdicts = _soak(scenarios, asked, base, Verdict) if scenarios else []
    for verdict in verdicts:
        _complain(verdict)
    bad = any(verdict.bad for verdict in verdicts)
    if scenarios:
        _table(verdicts)
    if "flips" in chosen:
        from . import flips

        bad |= not flips.main(base / "flips", asked.flips, asked.seed)
    if asked.json:
        asked.json.write_text(json.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    if bad:
        print(f"what was lost is in {base}")
        sys.exit(1)
    shutil.rmtree(base)


def _soak(scenarios, asked, base, verdict_type):
    """Tries, some at a time, the scenario first that has had the least time for its share."""
    rng = random.Random(asked.seed)
    streams = {name: faults(s.operations, rng) for name, s in scenarios.items()}
    started: Counter[str] = Counter()
    spent: defaultdict[str, float] = defaultdict(float)
    running: dict[int, tuple[str, float, Path]] = {}
    verdicts = []
    began = said = time.monotonic()
    limit = None if asked.faults else 60 * (asked.minutes or 10)

    def over(name: str) -> bool:
        if limit is None:
            return started[name] >= asked.faults
        return time.monotonic() - began > limit

    while True:
        waiting = [name for name in scenarios if not over(name)]
        if not waiting and not running:
            break
        if waiting and len(running) < asked.jobs:
            name = min(waiting, key=lambda n: (spent[n], started[n]))
            place = base / f"{name}-{started[name]:05d}"
            started[name] += 1
            spent[name] += 0.01  # or all of the first tries would be of one scenario
            child = _fork(scenarios[name], place, next(streams[name]))
            running[child] = name, time.monotonic(), place
            continue
        pid, status = os.waitpid(-1, 0)
        if pid not in running:
            continue
        name, since, place = running.pop(pid)
        spent[name] += time.monotonic() - since
        if status:
            raise SystemExit(f"soak: a try of {name} in {place} broke: see above")
        answer = place.with_name(f"{place.name}.json")
        verdicts.append(verdict_type.from_json(json.loads(answer.read_text())))
        if not verdicts[-1].bad:
            shutil.rmtree(place)
            for path in base.glob(f"{place.name}.*"):
                path.unlink()
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            _say(verdicts, said - began, limit, len(scenarios) * (asked.faults or 0))
    return verdicts


def _fork(scenario, place: Path, fault: Fault) -> int:
    """A try in a process of its own, which leaves its verdict in a file."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        from . import processes

        processes.adopt()
        verdict = scenario.attempt(place, fault)
        place.with_name(f"{place.name}.json").write_text(json.dumps(verdict.to_json()))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _say(verdicts, seconds: float, limit: float | None, total: int) -> None:
    left = limit - seconds if limit else seconds / len(verdicts) * (total - len(verdicts))
    bad = sum(verdict.bad for verdict in verdicts)
    share = f"{len(verdicts):,} tries" if limit else f"{len(verdicts):,} of {total:,} tries"
    print(f"{share}, {bad} with losses, {timedelta(seconds=round(max(0, left)))} left", flush=True)


def _complain(verdict) -> None:
    fields = ("lost", "doubled", "differs", "badly")
    for kind in fields:
        for text in getattr(verdict, kind):
            fault = f"{verdict.fault.kind} at operation {verdict.fault.at} ({verdict.what})"
            print(f"{verdict.scenario}: {kind}: {fault}: {text}")


def _table(verdicts) -> None:
    rows = defaultdict(Counter)
    for verdict in verdicts:
        row = rows[verdict.scenario]
        row["tries"] += 1
        if verdict.what:
            row[COLUMNS[verdict.fault.kind.partition(":")[0]]] += 1
        for column, found in (
            ("losses", verdict.lost),
            ("doubles", verdict.doubled),
            ("bit differences", verdict.differs),
            ("told badly", verdict.badly),
            ("left over", verdict.junk),
        ):
            row[column] += bool(found)
    names = ("tries", *COLUMNS.values(), "losses", "doubles", "bit differences", "told badly")
    columns = (*names, "left over")
    print(" ".join(["scenario", *columns]))
    for name, row in rows.items():
        cells = (f"{row[column]:>{len(column)},}" for column in columns)
        print(" ".join([f"{name:8}", *cells]))


if __name__ == "__main__":
    try:
        main()
    finally:
        gc.unfreeze()
