"""Overhead of `steppe sweep run` with one worker, compared with the same runs in one process."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import torch
from harness import Result, command, option, seconds, track

from steppe.sweeps import Grid, Job, write_plan
from steppe.training import train


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    runs: int = option(30, "Runs in the sweep.", min=6)
    steps: int = option(40, "Steps per run.", min=1)


def measure(options: Options) -> Result:
    steps, cpu = options.steps, options.where
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        grid = Grid(
            ("RotatedDigits",),
            draws=-(-options.runs // 6),
            trials=1,
            overrides=(f"steps={steps}", f"checkpoint_every={steps}", "device=cpu"),
        )
        sweep = write_plan(grid, Path(home) / "sweep")
        jobs = [Job(sweep.folder(name)) for name in sweep.names]
        train(jobs[0].config(), Path(home) / "warm-up")
        alone = 0.0
        for job in track(jobs, "runs alone"):
            alone += seconds(cpu, partial(train, job.config(), Path(home) / job.name))
        run = [sys.executable, "-m", "steppe", "sweep", "run", str(sweep.path), "--workers", "1"]
        whole = seconds(cpu, lambda: subprocess.run(run, check=True, capture_output=True))
        done = sum(job.result.exists() for job in jobs)
    return {
        "runs": len(jobs),
        "done": done,
        "steps": steps,
        "seconds of the runs alone": round(alone, 2),
        "seconds of the sweep": round(whole, 2),
        "seconds added to each run": round((whole - alone) / len(jobs), 3),
    }


main = command(Options, measure)
