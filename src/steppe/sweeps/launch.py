"""Launchers by name: each only starts workers."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.live import Live

from steppe.errors import UserError
from steppe.strangers import printable

from .plan import read_plan
from .status import Status, show
from .tidy import tidy


def run(
    path: Path,
    launcher: str,
    *,
    workers: int | None,
    per_gpu: int,
    threads: int,
    stale: float,
    address: str | None,
    sbatch: tuple[str, ...],
    dry_run: bool,
) -> bool | None:
    """Start workers for a sweep and wait for its end.

    Returns:
        Whether every run is done; None where workers were only submitted.
    """
    sweep = read_plan(path)
    given = {
        "--address": (address, "ray"),
        "--sbatch": (sbatch, "slurm"),
        "--dry-run": (dry_run, "slurm"),
    }
    for option, (value, of) in given.items():
        if value and launcher != of:
            raise UserError(f"{option} is for --launcher {of}, not {launcher}")
    tidy(sweep, stale)
    if launcher == "slurm":
        from .slurm import submit

        print(printable(submit(sweep, workers, per_gpu, threads, stale, sbatch, dry_run)))
        return None
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def refresh(status: Status) -> None:
            live.update(show(sweep, status), refresh=console.is_terminal)

        if launcher == "ray":
            from .ray import run_ray

            status = run_ray(
                sweep,
                workers=workers,
                per_gpu=per_gpu,
                threads=threads,
                stale=stale,
                address=address,
                show=refresh,
            )
        else:
            from .local import run_local

            status = run_local(
                sweep, workers=workers, per_gpu=per_gpu, threads=threads, stale=stale, show=refresh
            )
    console.print(show(sweep, status))
    return status.complete
