"""Merge the runs of sweeps in weight space: one merged run per method, target and trial."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from steppe.errors import UserError

from .store import Job
from .sweep import Sweep

log = logging.getLogger("steppe")


def groups(sweeps: Sequence[Sweep], *, together: bool) -> Mapping[str, list[Path]]:
    """The finished runs to merge, by the new run's name.

    Args:
        sweeps: the sweeps; runs of the same method, target and trial belong together.
        together: merge runs that differ only in the draw; otherwise, each run is by itself.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for sweep in sweeps:
        for name, axes in sweep.axes.items():
            result = Job(sweep.folder(name)).result
            if not result.exists():
                continue
            trial = f"-trial{axes['trial']}"
            group = name.replace(f"{trial}-draw{axes['draw']}", trial) if together else name
            found[group].append(result)
    if not found:
        raise UserError(f"no finished runs in {', '.join(str(sweep.path) for sweep in sweeps)}")
    if not together:
        for name, runs in found.items():
            if len(runs) > 1:
                raise UserError(f"two sweeps have a run named {name}: merge them one at a time")
        return found
    alone = [name for name, runs in found.items() if len(runs) == 1]
    if len(alone) == len(found):
        raise UserError(
            "every method has only one finished run per target and trial: plan several with "
            "--draws N --init-seed 0, or pass the folders of runs"
        )
    for name in alone:
        log.warning("%s: left out, because only one of its runs is finished", name)
        del found[name]
    return found
