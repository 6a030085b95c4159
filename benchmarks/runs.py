"""Training runs inside a benchmark."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import option

from steppe.console import Meter, stderr
from steppe.errors import UserError
from steppe.sweeps import Crew, Grid, Job, Status, jobs, run_sweep, write_plan
from steppe.training import RunDirectory


@dataclass(frozen=True, kw_only=True)
class SweepOptions(harness.Options):
    """Options of benchmarks that run as sweeps, which resume after an interruption."""

    out: Path = option(Path("runs/benchmarks"), "Folder for the sweeps.")
    workers: int | None = option(None, "Concurrent runs (default: one per core or GPU).")
    per_gpu: int = option(1, "Concurrent runs per GPU.", min=1)


def carry_out(
    name: str, planned: Sequence[Grid], options: SweepOptions
) -> list[list[RunDirectory | None]]:
    """Run every grid and return its runs; None for runs that diverged."""
    sweep = write_plan(planned, options.out / name, command=f"benchmarks {name}", extend=True)
    with Meter(name, len(sweep.names), console=stderr()) as meter:

        def show(status: Status) -> None:
            meter.update(status.counts["done"] + status.counts["failed"])

        run_sweep(sweep, crew=Crew(workers=options.workers, per_gpu=options.per_gpu), show=show)

    def result(run: str) -> RunDirectory | None:
        found = RunDirectory(Job(sweep.folder(run)).result)  # exists once done
        return found if found.exists() else None

    return [[result(run) for run, _ in jobs(grid)] for grid in planned]


def refuse_own(own: Collection[str], overrides: Sequence[str]) -> None:
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in own or key.removesuffix(".name") in own:
            raise UserError(f"--set {text}: the benchmark sets {key}; use its option instead")


def said(run: RunDirectory, images: Path) -> list[str]:
    """Return the log messages of a run, without local paths."""
    found = []
    for line in (run.path / "log.txt").read_text().splitlines():
        _, _, level, message = line.split(" ", 3)
        if level != "DEBUG":
            found.append(message.replace(f"{images.resolve().parent}/", ""))
    return found
