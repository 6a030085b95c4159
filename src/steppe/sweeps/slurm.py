"""Workers on a Slurm cluster: an array job, written as a script that can be read and kept."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from steppe.durable import replace
from steppe.errors import UserError
from steppe.strangers import command

from .local import worker_command
from .plan import Sweep
from .status import look

WORKERS = 16
"""Unless told how many: no more than that, nor more than there are runs left."""
_GRACE_SECONDS = 60
"""Before a job's time is up, for a worker to save its run and give it back."""
_GPU_OPTIONS = ("--gres", "--gpus", "-G", "--tres-per")


def submit(
    sweep: Sweep,
    workers: int | None,
    per_gpu: int,
    threads: int,
    stale: float,
    sbatch: tuple[str, ...] = (),
    dry_run: bool = False,
) -> str:
    """Submit workers for a sweep as an array job.

    Args:
        sweep: the sweep.
        workers: how many; one for each run that is left, 16 at most, unless given.
        per_gpu: workers in each task of the array, which share its GPU.
        threads: of each worker, on a CPU; Slurm sets as many CPUs aside for it.
        stale: seconds after which a silent worker is taken for dead.
        sbatch: options for sbatch, such as `--time=12:00:00`; they override the script's own.
        dry_run: only write the script.

    Returns:
        What to tell the user.
    """
    status = look(sweep, stale)
    left = sum(status.counts[state] for state in ("planned", "running", "lost"))
    if not left:
        return "\n".join([f"{sweep.path}: nothing is left to be run", *status.problems])
    number = per_gpu * math.ceil((workers or min(left, WORKERS)) / per_gpu)
    path = sweep.path.resolve() / "slurm" / "sweep.sbatch"
    text = script(sweep, number, per_gpu, threads, stale, sbatch)
    path.parent.mkdir(exist_ok=True)
    replace(path, os.fsencode(text))
    damaged = "".join(f"\n{problem}" for problem in status.problems)
    gpus = "" if "gpus" in text or "gres" in text else " (no GPU is asked for: --sbatch=--gpus=1)"
    if dry_run:
        return (
            f"{path}: {number} workers{gpus}; submit them with: {command('sbatch', path)}{damaged}"
        )
    job = _sbatch(path)
    few = "" if workers else f" (--workers N for another number; {left:,} runs are left)"
    return (
        f"job {job}: {number} workers{few}{gpus}, as {path} says; 'scancel {job}' ends them\n"
        f"follow them with: {command('steppe', 'sweep', 'status', sweep.path, '--watch')}{damaged}"
    )


def script(
    sweep: Sweep, workers: int, per_gpu: int, threads: int, stale: float, sbatch: tuple[str, ...]
) -> str:
    """The script for sbatch."""
    home = sweep.path.resolve()
    if any(character in str(home) for character in '"\\\n'):
        raise UserError(
            f"{home} cannot be named in a script for sbatch: choose a folder without quotes, "
            "backslashes and line breaks"
        )
    for option in sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UserError(
                f"--sbatch={option} is no option of sbatch: --sbatch=--time=12:00:00 is"
            )
    tasks = math.ceil(workers / per_gpu)
    log = str(home / "slurm").replace("%", "%%") + "/%A_%a.log"
    options = [
        "--job-name=" + re.sub(r"[^\w.+-]", "_", f"steppe-{home.name}"),
        f"--array=0-{tasks - 1}",
        f'--output="{log}"',
        "--open-mode=append",
        "--ntasks=1",
        f"--cpus-per-task={threads * per_gpu}",
        f"--signal=B:TERM@{_GRACE_SECONDS}",
        "--requeue",
    ]
    if per_gpu > 1 and not any(option.startswith(_GPU_OPTIONS) for option in sbatch):
        options.append("--gpus-per-node=1")
    worker = shlex.join(worker_command(home, "auto", threads, stale))
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Workers for {home}, written by 'steppe sweep run --launcher slurm'.",
            *(f"#SBATCH {option}" for option in (*options, *sbatch)),
            "",
            *(_one(worker) if per_gpu == 1 else _several(worker, per_gpu)),
            "",
        ]
    )


def _one(worker: str) -> list[str]:
    # In the shell's place, it hears Slurm's signals.
    return [
        "# It takes runs until none is left. SIGTERM, from scancel or a minute before the job's",
        "# time is up, has it save its run and give it back to the others.",
        f"exec {worker}",
    ]


def _several(worker: str, number: int) -> list[str]:
    return [
        f"# {number} workers share the GPU. They take runs until none is left. SIGTERM, from",
        "# scancel or a minute before the job's time is up, has them save their runs and give them",
        "# back to the others.",
        'pids=""',
        "trap 'kill -TERM $pids 2>/dev/null' TERM",
        f"for _ in $(seq {number}); do",
        f"  {worker} &",
        '  pids="$pids $!"',
        "done",
        "status=0",
        "for pid in $pids; do",
        "  # A trap ends `wait`: it waits again for as long as the worker is there.",
        '  while true; do wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null || break; done',
        "  [ $code -eq 0 ] || status=$code",
        "done",
        "exit $status",
    ]


def _sbatch(path: Path) -> str:
    """Submits a script; returns the job's number."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"sbatch was not found: run this where jobs are submitted, or take {path} there "
            "(--dry-run only writes it)"
        )
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch refused {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().partition(";")[0]
