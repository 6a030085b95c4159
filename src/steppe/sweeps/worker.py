"""The worker: takes runs from a sweep, one after the other, until none is left."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from steppe.domains import import_plugins
from steppe.errors import Diverged, Interrupted, UserError
from steppe.strangers import command
from steppe.training import train
from steppe.training.interrupts import Interrupts
from steppe.training.processes import find_device

from . import store, takeover
from .store import Claim
from .sweep import Sweep, read_plan
from .tidy import tidy

log = logging.getLogger("steppe")

DEATHS = 3
"""So many workers that died at one run, one after the other, are a failure of the run."""
REFUSALS = 3
"""A worker that cannot start so many runs in a row, for want of data say, would fail them all."""
IDLE_SECONDS = 2.0
"""Between two looks, while other workers have all that is left."""


@dataclass
class Worker:
    """Takes runs from a sweep.

    A run that does not fit into memory beside those of other workers has not failed: it is given
    back, and its worker takes runs beside half as many others, and beside one more for every run
    that has fitted since.

    Attributes:
        device: what runs compute on, whatever their configs say.
        stale: seconds of silence after which another worker is taken for dead.
        beat: seconds between two signs of its own life.
        limit: how many runs to take (default: as many as there are).
    """

    sweep: Sweep
    device: str = "auto"
    stale: float = store.STALE_SECONDS
    beat: float = store.BEAT_SECONDS
    limit: int | None = None
    _done: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _refused: int = 0
    _crowd: tuple[int, float] | None = None
    """Beside how many others a run did not fit, and when; None while there is room."""

    def work(self) -> int:
        """Carries runs out until none is left; returns how many it finished."""
        finished = taken = 0
        with Interrupts() as interrupts:  # a run has its own; this is for the time between runs
            while self.limit is None or taken < self.limit:
                claim, left = self._next()
                if interrupts.number is not None:
                    if claim is not None:
                        claim.release()
                    raise Interrupted(interrupts.number)
                if claim is not None:
                    taken += 1
                    finished += self._carry_out(claim)
                    _free_memory()
                elif left:
                    time.sleep(min(IDLE_SECONDS, self.stale / 2))
                else:
                    break
        return finished

    def _next(self) -> tuple[Claim | None, bool]:
        """The first run that can be taken, taken; and whether runs are left that others have."""
        self.sweep = read_plan(self.sweep.path)  # it may have been extended
        if not self._has_room():
            return None, True
        now, left = store.clock(self.sweep.path), False
        names = [name for name in self.sweep.names if name not in self._done]
        for job, events, state in self.sweep.survey(now, self.stale, names):
            for problem in set(store.damage(job, events)) - self._told:
                log.warning("%s", problem)
                self._told.add(problem)
            if state == "done":
                job.settle(events[-1])
                self._done.add(job.name)
            elif state == "lost" and store.deaths(events) >= DEATHS:
                # It may be what kills them, by taking all memory for example.
                error = f"{DEATHS} workers died of it without a word or progress: out of memory?"
                job.note(events[-1].number + 1, "failed", error=error, traceback="")
                left = True
            elif state in ("planned", "lost"):
                claim = takeover.claim(job, events, device=self.device, memory=self._memory)
                if claim is not None:
                    return claim, True
                left = True
            elif state == "running":
                left = True
        return None, left

    @cached_property
    def _memory(self) -> str:
        """Names the memory that its runs are in: a GPU's or the machine's."""
        device = find_device(self.device)
        if device.type == "cuda":
            return str(torch.cuda.get_device_properties(device).uuid)
        return socket.gethostname()

    def _beside(self, since: float) -> tuple[set[str], set[str], int]:
        """Who else has had runs in the same memory since then, who has now, how many fitted."""
        now, had, have, fitted = store.clock(self.sweep.path), set(), set(), 0
        for job, events, _ in self.sweep.survey(now, self.stale):
            for event, after in zip_longest(events, events[1:]):
                if event.kind != "claim" or event.facts.get("memory") != self._memory:
                    continue
                who = {str(event.facts.get("worker"))} - {store.worker_name()}
                if after is None and job.alive(event, now, self.stale):
                    had |= who
                    have |= who
                elif after is not None and after.time >= since:
                    had |= who
                    fitted += after.kind == "done"
        return had, have, fitted

    def _has_room(self) -> bool:
        """Whether a run may fit, by what others are at work and what has fitted since."""
        if self._crowd is None:
            return True
        others, since = self._crowd
        _, at_work, fitted = self._beside(since)
        allowed = others // 2 + fitted
        if allowed >= others:
            self._crowd = None
        return len(at_work) <= allowed

    def _carry_out(self, claim: Claim) -> bool:
        name, began, failure = claim.job.name, time.time(), None
        log.info("%s: attempt %d", name, claim.number)
        try:
            config = claim.job.config()
            import_plugins(config.plugins)
            with self._alive(claim) as lost:
                train(config.model_copy(update={"device": self.device}), claim.folder, resume=True)
        except Interrupted:
            if lost():
                log.warning("%s: taken over by another worker, or cancelled", name)
                return False
            claim.release()
            raise
        except Exception as error:  # which holds what the run had: only its words are kept
            failure = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                "diverged": isinstance(error, Diverged),
            }
            wanting, refused = _out_of_memory(error), isinstance(error, UserError)
        if failure is not None:
            _free_memory()  # before others may take the run
            # Since it began: those that were just as short of memory may be gone by now.
            if wanting and (others := len(self._beside(began)[0])):
                claim.release()
                self._crowd = others, time.time()
                log.warning("%s: no memory was left beside %d other runs: given back", name, others)
            else:
                self._fail(claim, refused, failure)
            return False
        if not claim.commit():
            log.warning("%s: finished, but another worker has it: the result is dropped", name)
            return False
        log.info("%s: done", name)
        self._refused = 0
        return True

    def _fail(self, claim: Claim, refused: bool, failure: dict[str, Any]) -> None:
        claim.fail(**failure)
        log.error("%s: failed: %s", claim.job.name, failure["error"])
        self._refused = self._refused + 1 if refused else 0
        if self._refused == REFUSALS:
            raise UserError(
                f"{REFUSALS} runs in a row failed here for the same kind of reason "
                f"({failure['error']}): fix that on this machine, then: "
                + command("steppe", "sweep", "retry", self.sweep.path)
            )

    @contextmanager
    def _alive(self, claim: Claim) -> Iterator[Callable[[], bool]]:
        """Shows signs of life while a run goes on, and ends it when it is no longer ours."""
        over, lost = threading.Event(), threading.Event()

        def beat() -> None:
            while not over.wait(self.beat):
                try:
                    if claim.held():
                        claim.beat()
                        continue
                except OSError as error:  # of a file system that is away for a moment
                    log.warning("%s: no sign of life could be given: %s", claim.job.name, error)
                    continue
                lost.set()
                signal.raise_signal(signal.SIGTERM)  # the run hears it as it would a scheduler's
                return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lost.is_set
        finally:
            over.set()
            thread.join()


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says so; not all libraries raise torch's."""
    texts = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        wanting = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if wanting or any(text in str(error).lower() for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_memory() -> None:
    """Leaves to others what the last run had, which torch would keep for the next."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # of a GPU that failed, which is still to be noted
            log.warning("memory could not be freed: %s", error)


def work(
    path: Path,
    device: str = "auto",
    threads: int = 1,
    stale: float = store.STALE_SECONDS,
    limit: int | None = None,
) -> int:
    """Take runs from a sweep until none is left; what every launcher starts.

    Args:
        path: the sweep's folder.
        device: what to compute on.
        threads: of a CPU; the same number everywhere, because results depend on it.
        stale: seconds after which a silent worker is taken for dead; four signs of life in them.
        limit: how many runs to take, at most.

    Returns:
        How many runs this worker finished.
    """
    find_device(device)  # before a run is taken that could not be carried out
    torch.set_num_threads(threads)
    beat = min(store.BEAT_SECONDS, stale / 4)
    sweep = read_plan(path)
    tidy(sweep, stale)
    gc.freeze()  # what is imported by now is not looked through again after every run
    try:
        return Worker(sweep, device, stale, beat, limit).work()
    finally:
        gc.unfreeze()
