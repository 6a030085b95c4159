"""Workers on a Slurm cluster: an array job, written as a script that can be read and kept."""

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
"""At most so many by default."""
_GRACE_SECONDS = 60
"""Before a job's time is up, for a worker to save its run and give it back."""
_GPU_OPTIONS = ("--gres", "--gpus", "-G", "--tres-per")
_ONE = """
# It takes runs until none is left. SIGTERM, from scancel or a minute before the job's
# time is up, has it save its run and give it back to the others.
exec {worker}
"""
_SEVERAL = """
# {number} workers share the GPU. They take runs until none is left. SIGTERM, from
# scancel or a minute before the job's time is up, has them save their runs and give them
# back to the others.
pids=""
trap 'kill -TERM $pids 2>/dev/null' TERM
for _ in $(seq {number}); do
  {worker} &
  pids="$pids $!"
done
status=0
for pid in $pids; do
  # A trap ends `wait`: it waits again for as long as the worker is there.
  while true; do wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null || break; done
  [ $code -eq 0 ] || status=$code
done
exit $status
"""


@register_launcher("slurm")
class Slurm:
    """An array job that sbatch submits, one worker in each task, or --per-gpu of them.

    Args:
        sbatch: an option for sbatch, such as --sbatch=--time=12:00:00; it overrides the script's.
        dry_run: only write the script for Slurm.
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
                    f"--sbatch={option} is no option of sbatch: --sbatch=--time=12:00:00 is"
                )
        self.sbatch, self.dry_run = sbatch, dry_run

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> str:
        status = look(sweep, crew.stale)
        damaged = "".join(f"\n{problem}" for problem in status.problems)
        if status.over:
            return f"{sweep.path}: nothing is left to be run{damaged}"
        tasks = math.ceil((crew.workers or min(status.left, WORKERS)) / crew.per_gpu)
        path = sweep.path.resolve() / "slurm" / "sweep.sbatch"
        text = self._script(sweep, crew, tasks)
        path.parent.mkdir(exist_ok=True)
        replace(path, os.fsencode(text))
        asked = "gpus" in text or "gres" in text
        gpus = "" if asked else " (no GPU is asked for: --sbatch=--gpus=1)"
        number = f"{tasks * crew.per_gpu} workers"
        if self.dry_run:
            return f"{path}: {number}{gpus}; submit them with: {command('sbatch', path)}{damaged}"
        job = _submit(path)
        few = f" (--workers N for another number; {status.left:,} runs are left)"
        return (
            f"job {job}: {number}{'' if crew.workers else few}{gpus}, as {path} says; "
            f"'scancel {job}' ends them\nfollow them with: "
            f"{command('steppe', 'sweep', 'status', sweep.path, '--watch')}{damaged}"
        )

    def _script(self, sweep: Sweep, crew: Crew, tasks: int) -> str:
        home = sweep.path.resolve()
        if any(character in str(home) for character in '"\\\n'):
            raise UserError(
                f"{home} cannot be named in a script for sbatch: choose a folder without quotes, "
                "backslashes and line breaks"
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
