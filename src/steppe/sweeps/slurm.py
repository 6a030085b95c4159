"""Workers on a Slurm cluster: an array job, submitted as a script that stays in the sweep."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

from steppe.durable import replace
from steppe.errors import UserError
from steppe.options import Option
from steppe.strangers import command

from .launch import Crew, Show, register_launcher
from .status import look
from .sweep import Sweep

WORKERS = 16
"""Default limit on the number of workers."""
_GRACE_SECONDS = 60
"""Time for a worker to save and release its run before the job's time limit."""
_GPU_OPTIONS = ("--gres", "--gpus", "-G", "--tres-per")
_ONE = """
# The worker takes runs until none is left. On SIGTERM (from scancel, or a minute before
# the time limit), it saves its run and releases it to other workers.
exec {worker}
"""
_SEVERAL = """
# {number} workers share the GPU and take runs until none is left. On SIGTERM (from scancel,
# or a minute before the time limit), they save their runs and release them to other workers.
pids=""
trap 'kill -TERM $pids 2>/dev/null' TERM
for _ in $(seq {number}); do
  {worker} &
  pids="$pids $!"
done
status=0
for pid in $pids; do
  # The trap interrupts `wait`, so wait again while the worker exists.
  while true; do wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null || break; done
  [ $code -eq 0 ] || status=$code
done
exit $status
"""


@register_launcher("slurm")
class Slurm:
    """Submit workers as an array job, one per task, or --per-gpu of them.

    Args:
        sbatch: an option for sbatch, such as --sbatch=--time=12:00:00; overrides the script's and
            can be repeated.
        dry_run: write the Slurm script without submitting it.
    """

    def __init__(
        self,
        *,
        sbatch: Annotated[tuple[str, ...], Option()] = (),
        dry_run: Annotated[bool, Option()] = False,
    ) -> None:
        for option in sbatch:
            if not option.startswith("-") or "\n" in option:
                raise UserError(
                    f"--sbatch={option} is not an sbatch option: write --sbatch=--time=12:00:00"
                )
        self.sbatch, self.dry_run = sbatch, dry_run

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> str:
        status = look(sweep, crew.stale)
        damaged = "".join(f"\n{problem}" for problem in status.problems)
        if status.over:
            return f"{sweep.path}: no runs are left{damaged}"
        tasks = math.ceil((crew.workers or min(status.left, WORKERS)) / crew.per_gpu)
        path = sweep.path.resolve() / "slurm" / "sweep.sbatch"
        text = self._script(sweep, crew, tasks)
        path.parent.mkdir(exist_ok=True)
        replace(path, os.fsencode(text))
        asked = "gpus" in text or "gres" in text
        gpus = "" if asked else " (without GPUs; request them with --sbatch=--gpus=1)"
        number = f"{tasks * crew.per_gpu} workers"
        if self.dry_run:
            return f"{path}: {number}{gpus}; submit them with: {command('sbatch', path)}{damaged}"
        job = _submit(path)
        few = f" for {status.left:,} runs (change the number with --workers)"
        return (
            f"job {job}: {number}{'' if crew.workers else few}{gpus}, submitted from {path}; "
            f"stop them with 'scancel {job}'\nfollow them with: "
            f"{command('steppe', 'sweep', 'status', sweep.path, '--watch')}{damaged}"
        )

    def _script(self, sweep: Sweep, crew: Crew, tasks: int) -> str:
        home = sweep.path.resolve()
        if any(character in str(home) for character in '"\\\n'):
            raise UserError(
                f"sbatch cannot handle {home}: choose a folder without quotes, backslashes or "
                "line breaks"
            )
        log = str(home / "slurm").replace("%", "%%") + "/%A_%a.log"
        options = [
            "--job-name=" + re.sub(r"[^\w.+-]", "_", f"steppe-{home.name}"),
            f"--array=0-{tasks - 1}",
            f'--output="{log}"',
            "--open-mode=append",
            "--ntasks=1",
            f"--cpus-per-task={crew.threads * crew.per_gpu}",
            f"--signal=B:TERM@{_GRACE_SECONDS}",
            "--requeue",
        ]
        if crew.per_gpu > 1 and not any(o.startswith(_GPU_OPTIONS) for o in self.sbatch):
            options.append("--gpus-per-node=1")
        worker = shlex.join(crew.command(home, "auto"))
        lines = [
            "#!/bin/bash",
            f"# Workers for {home}, written by 'steppe sweep run --launcher slurm'.",
            *(f"#SBATCH {option}" for option in (*options, *self.sbatch)),
            (_ONE if crew.per_gpu == 1 else _SEVERAL).format(worker=worker, number=crew.per_gpu),
        ]
        return "\n".join(lines)


def _submit(path: Path) -> str:
    """Submit a script; return the job's number."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"sbatch was not found: run this where jobs can be submitted, or submit {path} there "
            "(--dry-run only writes it)"
        )
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch rejected {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().partition(";")[0]
