"""Sweeps: many runs, planned, carried out by any number of workers, and watched."""

from .local import run_local
from .plan import Grid, Sweep, jobs, read_plan, target_sets, write_plan
from .status import Status, cancel, look, retry
from .store import Claim, Event, Job
from .worker import Worker, work

__all__ = [
    "Claim",
    "Event",
    "Grid",
    "Job",
    "Status",
    "Sweep",
    "Worker",
    "cancel",
    "jobs",
    "look",
    "read_plan",
    "retry",
    "run_local",
    "target_sets",
    "work",
    "write_plan",
]
