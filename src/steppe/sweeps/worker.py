"""The worker: takes runs from a sweep, one after the other, until none is left."""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from steppe.domains import import_plugins
from steppe.errors import Interrupted
from steppe.training import train
from steppe.training.interrupts import Interrupts

from . import store
from .plan import Sweep, read_plan
from .store import Claim, Job

log = logging.getLogger("steppe")

DEATHS = 3
"""So many workers that died at one run, one after the other, are a failure of the run."""
IDLE_SECONDS = 2.0
"""Between two looks, while other workers have all that is left."""


@dataclass
class Worker:
    """Takes runs from a sweep.

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
    _over: set[str] = field(default_factory=set)

    def work(self) -> int:
        """Carries runs out until none is left; returns how many it finished."""
        finished = taken = 0
        with Interrupts() as interrupts:  # a run has its own; this is for the time between runs
            while self.limit is None or taken < self.limit:
                claim = self._next()
                if interrupts.number is not None:
                    if claim is not None:
                        claim.release()
                    raise Interrupted(interrupts.number)
                if claim is None:
                    if not self._waiting():
                        break
                    time.sleep(min(IDLE_SECONDS, self.stale / 2))
                    continue
                taken += 1
                finished += self._carry_out(claim)
        return finished

    def _next(self) -> Claim | None:
        """The first run that can be taken, taken."""
        now = store.clock(self.sweep.path)
        for name in self.sweep.names:
            if name in self._over:
                continue
            job = Job(self.sweep.folder(name))
            events = job.events()
            state = store.state_of(job, events, now, self.sweep.retries, self.stale)
            if state in ("done", "failed", "cancelled"):
                job.settle(events[-1])
                self._over.add(name)
            elif state == "lost" and store.deaths(events) >= DEATHS:
                # It may be what kills them, by taking all memory for example.
                error = f"{DEATHS} workers died of it without a word: out of memory?"
                job.note(events[-1].number + 1, "failed", error=error, traceback="")
            elif state in ("planned", "lost"):
                claim = store.claim(job, events, device=self.device)
                if claim is not None:
                    return claim
        return None

    def _waiting(self) -> bool:
        """Whether runs are left that others have, and may yet lose."""
        return len(self._over) < len(self.sweep.names)

    def _carry_out(self, claim: Claim) -> bool:
        name = claim.job.name
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
            claim.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
            log.error("%s: failed: %s", name, error)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # of a run that did not fit
            return False
        if not claim.commit():
            log.warning("%s: finished, but another worker has it: the result is dropped", name)
            return False
        log.info("%s: done", name)
        return True

    @contextmanager
    def _alive(self, claim: Claim) -> Iterator[Callable[[], bool]]:
        """Shows signs of life while a run goes on, and ends it when it is no longer ours."""
        over, lost = threading.Event(), threading.Event()

        def beat() -> None:
            while not over.wait(self.beat):
                if claim.held():
                    claim.beat()
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
    torch.set_num_threads(threads)
    beat = min(store.BEAT_SECONDS, stale / 4)
    return Worker(read_plan(path), device, stale, beat, limit).work()
