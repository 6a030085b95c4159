"""Run the winner of each search on more splits: the second phase of a protocol that searches once.

The plan grows, as that of `steppe reproduce` does: when all runs of a search have a result, its
winner's reruns are added, and the workers that are there take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from steppe.errors import UserError
from steppe.reports import load_runs
from steppe.reports.followed import Followed, followed, selection_of
from steppe.reports.selection import SELECTIONS
from steppe.sweeps import Job, Sweep, look, read_plan
from steppe.sweeps.growing import diverged, growing
from steppe.sweeps.plan import rerun
from steppe.sweeps.sweep import AXES


def plan_winners(path: Path) -> tuple[Sweep, int]:
    """Add the reruns of all winners that are known to a sweep's plan.

    Returns:
        The sweep, and the number of searches whose winner is unknown, because runs have no result.
    """
    sweep = read_plan(path)
    protocol = protocol_of(sweep)
    if protocol is None or not protocol.reruns:
        return sweep, 0
    winners, unknown = [], 0
    for names in _searches(sweep).values():
        winner, known = _winner(sweep, names, protocol)
        unknown += not known
        winners += [winner] if winner else []
    return rerun(sweep, winners, range(1, protocol.reruns + 1)), unknown


def protocol_of(sweep: Sweep) -> Followed | None:
    """The protocol of a sweep, as its plan stores it."""
    try:
        return followed(sweep.facts.get("protocol"))
    except ValueError as error:
        raise UserError(f"{sweep.path} is damaged: {error}") from None


def _searches(sweep: Sweep) -> dict[tuple[object, ...], list[str]]:
    """The runs of each search: those of the first split that share targets and method."""
    found = defaultdict(list)
    for name, axes in sweep.axes.items():
        if axes["trial"] == 0:
            found[*(axes[axis] for axis in AXES), axes.get("tag")].append(name)
    return found


def _winner(sweep: Sweep, names: list[str], protocol: Followed) -> tuple[str | None, bool]:
    """The winner of a search, and whether the search is over.

    A run that diverged has lost. If all did, there is no winner.
    """
    done = [name for name in names if Job(sweep.folder(name)).result.exists()]
    left = set(names) - set(done)
    if len(diverged(sweep, left)) < len(left):
        return None, False
    if not done:
        return None, True
    runs = load_runs([Job(sweep.folder(name)).result for name in done]).runs
    if len(runs) < len(done):
        return None, False
    chosen = SELECTIONS[selection_of(protocol, None, SELECTIONS)](runs, runs[0].target_set)
    return (None, False) if chosen is None else (chosen.run.path.parent.name, True)


def reruns_left(sweep: Sweep) -> int:
    """How many runs the winners of a sweep's searches will add to its plan."""
    protocol = protocol_of(sweep)
    if protocol is None or not protocol.reruns:
        return 0
    planned = sum(1 for axes in sweep.axes.values() if axes["trial"])
    return protocol.reruns * len(_searches(sweep)) - planned


def carry_on(path: Path, run: Callable[[], bool | None]) -> bool | None:
    """Run a sweep to the end, with the winners of its searches.

    Args:
        path: the sweep's folder.
        run: runs what is planned; returns whether every run is done, or None if it only submitted
            workers.
    """
    if not plan_winners(path)[1]:
        return run()
    with growing(lambda: not plan_winners(path)[1]):
        complete = run()
    if complete is None or look(plan_winners(path)[0]).over:
        return complete
    return run()
