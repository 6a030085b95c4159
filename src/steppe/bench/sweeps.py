"""`steppe bench sweep` and `steppe bench report`: what many runs cost beyond themselves."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from steppe.sweeps import Grid, Job, Sweep, write_plan
from steppe.training import make_config, train

from .record import environment


def sweep_overhead(runs: int, steps: int) -> dict[str, Any]:
    """The seconds that a launcher and a worker add to each run, start and end included.

    The same runs are carried out one after the other in this process, and by ``steppe sweep run``
    with one worker.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        grid = Grid(
            ("RotatedDigits",),
            draws=-(-runs // 6),
            trials=1,
            overrides=(f"steps={steps}", f"checkpoint_every={steps}", "device=cpu"),
        )
        sweep = write_plan(grid, Path(home) / "sweep")
        configs = [Job(sweep.folder(name)).config() for name in sweep.names]
        train(configs[0], Path(home) / "warm-up")
        began = time.perf_counter()
        for name, config in zip(sweep.names, configs, strict=True):
            train(config, Path(home) / "alone" / name)
        alone = time.perf_counter() - began
        command = ["sweep", "run", str(sweep.path), "--workers", "1"]
        whole = _time([sys.executable, "-m", "steppe", *command])
        done = _done(sweep)
    return {
        "environment": environment(torch.device("cpu")),
        "runs": len(configs),
        "done": done,
        "steps": steps,
        "seconds of the runs alone": round(alone, 2),
        "seconds of the sweep": round(whole, 2),
        "seconds added to each run": round((whole - alone) / len(configs), 3),
    }


def _done(sweep: Sweep) -> int:
    return sum(Job(sweep.folder(name)).result.exists() for name in sweep.names)


def report_speed(
    runs: int, records: int, formats: Sequence[str] = ("json", "html")
) -> dict[str, Any]:
    """The time and memory that a report takes over many runs, in a process of its own.

    The runs are made up: four domains, 20 draws, three trials, PACS's targets.
    """
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "runs"
        _make_up(root, runs, records)
        seconds = {}
        for name in formats:
            out = Path(home) / f"report.{name}"
            command = ["report", str(root), "--format", name, "--out", str(out)]
            seconds[name] = round(_time([sys.executable, "-m", "steppe", *command]), 2)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {
        "environment": environment(torch.device("cpu")),
        "runs": runs,
        "records of each": records,
        "seconds": seconds,
        "peak memory of the largest process, GiB": round(peak, 2),
    }


def _make_up(root: Path, runs: int, records: int) -> None:
    rng = np.random.default_rng(0)
    axes = {"PACS": ("art_painting", "cartoon", "photo", "sketch")}
    methods = [(a, o) for a in ("ERM", "CORAL", "Fishr", "RSC") for o in ("adam", "sgd", "fad")]
    number = 0
    while number < runs:
        method, rest = number % len(methods), number // len(methods)
        target, rest = rest % 4, rest // 4
        trial, draw = rest % 3, rest // 3
        domains = axes["PACS"]
        algorithm, optimizer = methods[method]
        config = make_config(
            {
                "dataset": "PACS",
                "targets": [domains[target]],
                "algorithm": algorithm,
                "optimizer": {"name": optimizer, "lr": 1e-4 * (1 + draw)},
                "trial_seed": trial,
                "draw": draw,
                "space": "domainbed",
            }
        )
        folder = root / f"{number:05d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.to_json())
        (folder / "state").write_text("done\n")
        values = rng.random((records, 4, 2))
        lines = [
            json.dumps(_record(step * 300, domains, target, values[step]))
            for step in range(records)
        ]
        (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
        number += 1


def _record(
    step: int, domains: Sequence[str], target: int, values: np.ndarray[Any, Any]
) -> dict[str, Any]:
    def scores(value: float) -> dict[str, float]:
        return {
            "accuracy": value,
            "cross_entropy": 1 - value,
            "calibration_error": value / 10,
            "images": 400,
        }

    parts = [("test", "oracle") if i == target else ("train", "val") for i in range(len(domains))]
    return {
        "step": step,
        "epoch": step / 100,
        "loss": {"total": float(values[0, 0])},
        "domains": {
            name: {part: scores(float(v)) for part, v in zip(parts[i], values[i], strict=True)}
            for i, name in enumerate(domains)
        },
        "worst_accuracy": {"val": float(values.min())},
        "averaged": False,
        "seconds_per_step": 0.1,
        "evaluation_seconds": 3.0,
        "memory_gb": 4.0,
    }


def _time(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def tables(result: dict[str, Any]) -> list[Table]:
    """A result for the terminal."""
    table = Table("", "")
    for name, value in result.items():
        if name != "environment":
            table.add_row(name, str(value))
    return [table]
