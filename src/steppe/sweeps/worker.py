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

import torch

from steppe.domains import import_plugins
from steppe.errors import Interrupted, UserError
from steppe.training import train
from steppe.training.interrupts import Interrupts
from steppe.training.processes import find_device

from . import store
from .plan import Sweep, read_plan
from .store import Claim, Job

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
    back, and its worker takes runs beside half as many others, and one more after each that fits.

    Attributes:
        sweep: the sweep.
        device: what runs compute on, whatever their configs say.
        stale: seconds without a sign of life after which another worker is taken for dead.
        beat: seconds between two signs of its own life.
        limit: how many runs to take; none: as many as there are.
    """

    sweep: Sweep
    device: str = "auto"
    stale: float = store.STALE_SECONDS
    beat: float = store.BEAT_SECONDS
    limit: int | None = None
    _done: set[str] = field(default_factory=set)
    _refused: int = 0
    _company: int | None = None
    """Beside how many others it takes a run; as many as there are until one did not fit."""

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
                if claim is None:
                    if not left:
                        break
                    time.sleep(min(IDLE_SECONDS, self.stale / 2))
                    continue
                taken += 1
                finished += self._carry_out(claim)
                _free_memory()  # here, where no error holds what the run had
        return finished

    def _next(self) -> tuple[Claim | None, bool]:
        """The first run that can be taken, taken; and whether runs are left that others have."""
        self.sweep = read_plan(self.sweep.path)  # it may have been extended
        if self._company is not None and self._others(time.time()) > self._company:
            return None, True
        now, left = store.clock(self.sweep.path), False
        for name in self.sweep.names:
            if name in self._done:
                continue
            job = Job(self.sweep.folder(name))
            events = job.events()
            state = store.state_of(job, events, now, self.sweep.retries, self.stale)
            if state == "done":
                job.settle(events[-1])
                self._done.add(name)
            elif state == "lost" and store.deaths(events) >= DEATHS:
                # It may be what kills them, by taking all memory for example.
                error = f"{DEATHS} workers died of it without a word or progress: out of memory?"
                job.note(events[-1].number + 1, "failed", error=error, traceback="")
                left = True
            elif state in ("planned", "lost"):
                claim = store.claim(job, events, device=self.device, memory=self._memory)
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

    def _others(self, since: float) -> int:
        """How many other workers have had runs in the same memory since then."""
        now, found = store.clock(self.sweep.path), set()
        for name in self.sweep.names:
            if name in self._done:
                continue
            job = Job(self.sweep.folder(name))
            events = job.events()
            for event, after in zip_longest(events, events[1:]):
                if event.kind != "claim" or event.facts.get("memory") != self._memory:
                    continue
                alive = now - job.signs_of_life(event) < self.stale
                if after.time >= since if after else alive:
                    found.add(event.facts["worker"])
        return len(found - {store.worker_name()})

    def _carry_out(self, claim: Claim) -> bool:
        name, began = claim.job.name, time.time()
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
        except Exception as error:
            # Those that were just as short of it may be gone by now.
            others = self._others(began) if _out_of_memory(error) else 0
            if others:
                claim.release()
                self._company = others // 2
                log.warning(
                    "%s: no memory was left beside %d other runs. It is given back, and this "
                    "worker waits until at most %d others are at work",
                    *(name, others, self._company),
                )
                return False
            claim.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
            log.error("%s: failed: %s", name, error)
            self._refused = self._refused + 1 if isinstance(error, UserError) else 0
            if self._refused == REFUSALS:
                raise UserError(
                    f"{REFUSALS} runs in a row failed here for the same kind of reason ({error}): "
                    "mend that on this machine, then 'steppe sweep retry'"
                ) from None
            return False
        if not claim.commit():
            log.warning("%s: finished, but another worker has it: the result is dropped", name)
            return False
        log.info("%s: done", name)
        self._refused = 0
        if self._company is not None:
            self._company += 1
        return True

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


def _out_of_memory(error: Exception) -> bool:
    """Whether an error says so; not all libraries raise torch's."""
    texts = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    wanting = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return wanting or any(text in str(error) for text in texts)


def _free_memory() -> None:
    """Leaves to others what the last run had, which torch would keep for the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
        threads: of a CPU. One unless given, everywhere, so that results do not depend on it.
        stale: seconds after which a silent worker is taken for dead; four signs of life in them.
        limit: how many runs to take, at most.

    Returns:
        How many runs this worker finished.
    """
    find_device(device)  # before a run is taken that could not be carried out
    torch.set_num_threads(threads)
    beat = min(store.BEAT_SECONDS, stale / 4)
    return Worker(read_plan(path), device, stale, beat, limit).work()
