"""Time and memory of `steppe report` on many copies of a small run."""

import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import harness
from harness import Result, command, option, seconds, track

from steppe.training import make_config, train

METHODS = tuple(product(("ERM", "CORAL", "Fishr", "RSC"), ("adam", "sgd", "fad")))
TARGETS = ("0", "15", "30", "45")


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    runs: int = option(10_000, "Synthetic runs.", min=1)
    records: int = option(17, "Records per run.", min=1)


def measure(options: Options) -> Result:
    took = {}
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "runs"
        make_up(root, options)
        for name in ("json", "html"):
            words = [sys.executable, "-m", "steppe", "report", str(root), "--format", name]
            words += ["--out", f"{home}/report.{name}"]
            run = partial(subprocess.run, words, check=True, capture_output=True)
            took[name] = round(seconds(options.where, run), 2)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {
        "runs": options.runs,
        "records of each": options.records,
        "seconds": took,
        "peak memory of the largest process, GiB": round(peak, 2),
    }


def make_up(root: Path, options: Options) -> None:
    every = product(range(options.runs), range(3), TARGETS, METHODS)
    records: dict[str, bytes] = {}
    for number, axes in enumerate(track(islice(every, options.runs), "making up runs")):
        draw, trial, target, (algorithm, optimizer) = axes
        config = make_config(
            {
                "dataset": "RotatedDigits",
                "targets": [target],
                "algorithm": algorithm,
                "optimizer": {"name": optimizer, "lr": 1e-4 * (1 + draw)},
                "trial_seed": trial,
                "draw": draw,
                "space": "domainbed",
                "steps": options.records,
                "checkpoint_every": 1,
                "device": "cpu",
            }
        )
        if target not in records:
            train(config, root.parent / target)
            records[target] = (root.parent / target / "records.jsonl").read_bytes()
        folder = root / f"{number:05d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.to_json())
        (folder / "records.jsonl").write_bytes(records[target])
        (folder / "state").write_text("done\n")


main = command(Options, measure)
