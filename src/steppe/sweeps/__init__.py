"""Sweeps: plan many runs, execute them with any number of workers, and monitor them."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .launch import (
        Crew as Crew,
        Launcher as Launcher,
        launchers as launchers,
        register_launcher as register_launcher,
        run_sweep as run_sweep,
    )
    from .plan import (
        Grid as Grid,
        jobs as jobs,
        target_sets as target_sets,
        write_plan as write_plan,
    )
    from .status import Status as Status, cancel as cancel, look as look, retry as retry
    from .store import Claim as Claim, Event as Event, Job as Job
    from .sweep import Sweep as Sweep, read_plan as read_plan
    from .worker import Worker as Worker, work as work
else:  # hidden from type checkers, which would otherwise accept any attribute
    __getattr__, __dir__, __all__ = attach(__name__)
