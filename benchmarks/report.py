"""CPU time and memory of `sweep plan`, `sweep status` and `report` over many runs.

A sweep's first report reads every run; later ones read those that have changed.
"""

import math
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import Result, command, option, track

from steppe.sweeps import read_plan

GRID = {
    "datasets": ("RotatedDigits",),
    "targets": ("0", "15", "30", "45"),
    "algorithms": ("ERM", "CORAL", "Fishr", "RSC"),
    "optimizers": ("adam", "sgd", "fad"),
    "trials": ("0", "1", "2"),
}


# The command's own peak: getrusage would give that of the process that started it, if larger.
COMMAND = """
import atexit, pathlib, re, sys
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: sys.stderr.write(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]))
from steppe.cli import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    runs: int = option(10_000, "Runs of the sweep, rounded up to fill a grid.", min=1)
    records: int = option(17, "Records per run.", min=1)
    changed: int = option(12, "Runs that change before the second report.", min=0)


def measure(options: Options) -> Result:
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        path, page, tables = (Path(home) / name for name in ("sweep", "page.html", "tables.json"))
        found = {"sweep plan, with the estimate": _carry_out(*_plan(path, options))}
        shutil.rmtree(path)
        found["sweep plan"] = _carry_out(*_plan(path, options), "--no-estimate")
        runs = _finish(path, Path(home) / "run")
        found["sweep status"] = _carry_out("sweep", "status", path)
        report = ("report", path, "--format=json", "--out", tables)
        found["first report, JSON"] = _carry_out(*report)
        for config in sorted(path.glob("runs/*/result/config.json"))[: options.changed]:
            config.with_name("records.jsonl").touch()
        found["report, JSON"] = _carry_out(*report)
        found["report, HTML"] = _carry_out("report", path, "--format=html", "--out", page)
    return {
        "runs": runs,
        "records of each": options.records,
        "changed before the second report": options.changed,
        "CPU seconds": {name: seconds for name, (seconds, _) in found.items()},
        "peak memory in GiB": {name: peak for name, (_, peak) in found.items()},
    }


def _plan(path: Path, options: Options) -> list[str]:
    draws = math.ceil(options.runs / math.prod(map(len, GRID.values())))
    axes = {name: ",".join(values) for name, values in GRID.items()} | {
        "trials": str(len(GRID["trials"])),
        "draws": str(draws),
        "steps": str(options.records),
        "checkpoint-every": "1",
    }
    words = [f"--{name}={value}" for name, value in axes.items()]
    return ["sweep", "plan", str(path), *words]


def _carry_out(*words: object) -> tuple[float, float]:
    """The CPU seconds and the peak memory of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        check=True,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(seconds, 2), round(int(done.stderr.split()[-1]) / 2**20, 2)


def _finish(path: Path, sample: Path) -> int:
    """Mark every run of a sweep as done, with the records of one real run per target."""
    sweep = read_plan(path)
    records: dict[tuple[str, ...], bytes] = {}
    for job, *_ in track(sweep.survey(0.0, 1.0), "making up runs"):
        config = job.config()
        if config.targets not in records:
            out = sample / config.targets[0]
            _carry_out("train", "--config", job.path / "config.json", "--out", out)
            records[config.targets] = (out / "records.jsonl").read_bytes()
        job.note(1, "claim", step=None)
        job.note(2, "done", attempt=1)
        job.result.mkdir()
        shutil.copy(job.path / "config.json", job.result)
        (job.result / "records.jsonl").write_bytes(records[config.targets])
        (job.result / "state").write_text("done\n")
    return len(sweep.names)


main = command(Options, measure)
