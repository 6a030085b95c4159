"""Cost of averaging the weights of many runs, compared with reading their files once.

The checkpoints have random weights. Every measurement is a process of its own, with a warm page
cache. On a busy machine, compare CPU seconds.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import torch
from harness import Result, command, option, ratio, spread, take_turns, track

from steppe.averaging.merging import Soup
from steppe.training import RunDirectory, checkpoint, make_config, setup
from steppe.training.ingredients import NETWORK
from steppe.training.served import load_served

CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import merge
merge.work(sys.argv[2], sys.argv[3:])
"""


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    runs: int = option(20, "Number of runs.", min=2)
    backbone: str = option("resnet50", harness.KNOWN)
    rounds: int = option(5, "Number of measurements.", min=1)


def measure(options: Options) -> Result:
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        runs = _make(Path(home), options)
        turns = {name: partial(_child, name, runs) for name in CONTENDERS}
        found = take_turns(turns, options.rounds, "merging", warm_up=1)
        size = (runs[0] / "checkpoint/best" / checkpoint.MODEL).stat().st_size
    merging, *others = found
    return {
        "runs": options.runs,
        "backbone": options.backbone,
        "MB of a run": round(size / 1e6, 1),
        "rounds": options.rounds,
        **{
            unit: {name: spread([row[unit] for row in rows]) for name, rows in found.items()}
            for unit in ("seconds", "CPU seconds", "peak GiB")
        },
        "ratios": {
            f"{unit}, {merging} / {other}": ratio(
                *([row[unit] for row in found[name]] for name in (merging, other))
            )
            for unit in ("seconds", "CPU seconds")
            for other in others
        },
    }


def merge(runs: Sequence[RunDirectory]) -> None:
    soup = Soup(NETWORK)
    for run in runs:
        soup.add(load_served(run).tensors)
    soup.mean()


def read(runs: Sequence[RunDirectory]) -> None:
    for run in runs:
        load_served(run)


def read_bytes(runs: Sequence[RunDirectory]) -> None:
    for run in runs:
        for file in (run.checkpoints / "best").iterdir():
            file.read_bytes()


CONTENDERS: Mapping[str, Callable[[Sequence[RunDirectory]], None]] = {
    "merging": merge,
    "reading with checksums": read,
    "reading bytes": read_bytes,
}


def work(name: str, runs: Sequence[str]) -> None:
    """Measure a contender in this process."""
    began, spent = time.perf_counter(), time.process_time()
    CONTENDERS[name]([RunDirectory(Path(run)) for run in runs])
    status = Path("/proc/self/status").read_text().split()
    found = {
        "seconds": time.perf_counter() - began,
        "CPU seconds": time.process_time() - spent,
        "peak GiB": int(status[status.index("VmHWM:") + 1]) / 2**20,
    }
    print(json.dumps(found))


def _child(name: str, runs: Sequence[Path]) -> dict[str, float]:
    words = [sys.executable, "-c", CHILD, str(Path(__file__).parent), name, *map(str, runs)]
    done = subprocess.run(words, check=True, capture_output=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _make(home: Path, options: Options) -> list[Path]:
    values = {"dataset": "Doodles", "targets": "sketch", "backbone": options.backbone}
    config = make_config({**values, "weights": "none", "image_size": 64})
    state = setup.build(config, 7, 3, 3).state_dict()
    runs = [RunDirectory(home / str(number)) for number in range(options.runs)]
    for run in track(runs, "making up runs"):
        run.create(config)
        for value in state.values():
            if value.is_floating_point():
                torch.nn.init.normal_(value, std=0.01)
        checkpoint.save_best(run.checkpoints, 0, state, 0.5)
    return [run.path for run in runs]


main = command(Options, measure)
