"""The worker: executes the runs of a sweep, one after the other, until none is left."""

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
from steppe.errors import Diverged, Interrupted, RunError, UserError
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
"""A run fails after this many consecutive workers died on it."""
REFUSALS = 3
"""A worker stops after this many consecutive runs with a user error, such as missing data."""
IDLE_SECONDS = 2.0
"""Longest polling interval while other workers own all remaining runs; the first is a tenth."""


@dataclass
class Worker:
    """Executes the runs of a sweep.

    If a run does not fit in memory beside those of other workers, the worker releases it. From then
    on it takes a run only beside at most half as many others, plus one for each run that has
    finished since.

    Attributes:
        device: the device for all runs, whatever their configs say.
        stale: seconds without a heartbeat after which another worker is considered dead.
        beat: seconds between its own heartbeats.
        limit: maximum number of runs to take (default: no limit).
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
    """The number of others beside which a run did not fit, and when; None while there is room."""

    def work(self) -> int:
        """Execute runs until none is left; return how many finished."""
        finished, taken, idle = 0, 0, IDLE_SECONDS / 10
        with Interrupts() as interrupts:  # for the time between runs; each run has its own
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
                    idle = IDLE_SECONDS / 10
                elif left:
                    time.sleep(min(idle, self.stale / 2))
                    idle = min(2 * idle, IDLE_SECONDS)
                else:
                    break
        return finished

    def _next(self) -> tuple[Claim | None, bool]:
        """Claim the first available run; also return whether unfinished runs are left."""
        self.sweep = read_plan(self.sweep.path)  # the plan may have been extended
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
                # The run may be what kills them, for example by exhausting memory.
                error = (
                    f"{DEATHS} workers in a row died on this run without an error message or "
                    "progress: out of memory?"
                )
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
        """The identity of the memory that its runs use: a GPU's or the machine's."""
        device = find_device(self.device)
        if device.type == "cuda":
            return str(torch.cuda.get_device_properties(device).uuid)
        return socket.gethostname()

    def _beside(self, since: float) -> tuple[set[str], set[str], int]:
        """Other workers that used the same memory since then, those now, and runs done since."""
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
        """Whether few enough others are running for another run to fit."""
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
                log.warning("%s: stopped: another worker took it over, or it was cancelled", name)
                return False
            claim.release()
            raise
        except Exception as error:  # keep only its text: the error references the run's tensors
            failure = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                "diverged": isinstance(error, Diverged),
            }
            wanting, refused = _out_of_memory(error), isinstance(error, UserError)
        if failure is not None:
            _free_memory()  # before another worker can take the run
            fault = _fault(self.device)
            # Others since it began: those that also ran out of memory may have stopped by now.
            others = len(self._beside(began)[0]) if wanting or fault else 0
            if fault and others:
                # Through MPS, one process's fault stops all that share the GPU, and does not say
                # whose it was. So the run stays claimed, as by a worker that was killed.
                raise RunError(f"{name}: {failure['error']}: {fault}")
            if wanting and others:
                claim.release()
                self._crowd = others, time.time()
                log.warning("%s: out of memory beside %d other runs: released", name, others)
            else:
                self._fail(claim, refused, failure)
            if fault:
                raise RunError(f"{name}: {failure['error']}: {fault}")
            return False
        if not claim.commit():
            log.warning("%s: finished, but another worker took it over: result discarded", name)
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
                f"{REFUSALS} runs in a row failed on this machine, the last with "
                f"{failure['error']!r}. Fix the cause, then: "
                + command("steppe", "sweep", "retry", self.sweep.path)
            )

    @contextmanager
    def _alive(self, claim: Claim) -> Iterator[Callable[[], bool]]:
        """Give heartbeats during a run, and stop the run if another worker takes it over."""
        over, lost = threading.Event(), threading.Event()

        def beat() -> None:
            while not over.wait(self.beat):
                try:
                    if claim.held():
                        claim.beat()
                        continue
                except OSError as error:  # the file system may be back in a moment
                    log.warning("%s: heartbeat failed: %s", claim.job.name, error)
                    continue
                lost.set()
                signal.raise_signal(signal.SIGTERM)  # the run stops as for a scheduler's signal
                return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lost.is_set
        finally:
            over.set()
            thread.join()


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is out of memory; libraries use various classes."""
    texts = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        wanting = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if wanting or any(text in str(error).lower() for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fault(device: str) -> str:
    """Why this process can no longer use its GPU, as after an invalid access; or nothing."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(None if device == "auto" else device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _free_memory() -> None:
    """Free the memory that torch would keep cached for the next run."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # the GPU failed; the run's own failure is recorded later
            log.warning("could not free GPU memory: %s", error)


def work(
    path: Path,
    device: str = "auto",
    threads: int = 1,
    stale: float = store.STALE_SECONDS,
    limit: int | None = None,
) -> int:
    """Execute runs of a sweep until none is left; every launcher starts workers that call this.

    Args:
        path: the sweep's folder.
        device: the device for all runs.
        threads: CPU threads. Results depend on it, so use the same number everywhere.
        stale: seconds without a heartbeat after which a worker is considered dead; this worker
            gives at least four heartbeats in that time.
        limit: maximum number of runs to take.

    Returns:
        The number of runs that this worker finished.
    """
    find_device(device)  # before claiming a run that could not start
    torch.set_num_threads(threads)
    beat = min(store.BEAT_SECONDS, stale / 4)
    sweep = read_plan(path)
    tidy(sweep, stale)
    gc.freeze()  # exclude everything imported so far from the collection after each run
    try:
        return Worker(sweep, device, stale, beat, limit).work()
    finally:
        gc.unfreeze()
