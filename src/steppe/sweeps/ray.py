"""Workers on a Ray cluster: one task per slot, restarted when a node is lost."""

from __future__ import annotations

import logging
import math
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from steppe.errors import Interrupted, UserError
from steppe.options import Option

from .launch import Crew, Show, register_launcher
from .status import Status
from .supervise import RESTARTS, kept_dying, supervise
from .sweep import Sweep

_OBJECT_STORE_BYTES = 100 * 2**20  # enough: tasks return nothing
_KNOCK_SECONDS = 10
_STOP_SECONDS = 10
_SHARES = 10**4
"""Ray divides a GPU into ten-thousandths."""


@register_launcher("ray")
class Ray:
    """Run workers as tasks of a Ray cluster, and restart those of lost nodes elsewhere.

    New nodes get workers too. Every node must see the sweep's folder and the data at the same
    paths.

    Args:
        address: Ray cluster, or auto for the one running on this machine (default: $RAY_ADDRESS, or
            a temporary local cluster).
    """

    def __init__(self, *, address: Annotated[str | None, Option()] = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS", "")

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> Status:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not self.address:
            # Bind to loopback, as Ray does on other systems. Ray reads this when it is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        mine = not ray.is_initialized()
        if mine:
            _connect(self.address)
        try:
            # After `ray.init`, which installs signal handlers of its own.
            return supervise(sweep, crew, show, _Tasks(sweep, crew))
        finally:
            if mine:
                ray.shutdown()


def _connect(address: str) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        store = _OBJECT_STORE_BYTES
        ray.init("local", include_dashboard=False, object_store_memory=store, **quiet)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # fails at once, where Ray would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"cannot connect to a Ray cluster at {address!r} ({reason}): start one with "
            "'ray start --head', or omit --address and unset $RAY_ADDRESS to use this machine"
        ) from None


def slots(per_gpu: int, threads: int) -> tuple[int, bool]:
    """The number of workers that the cluster can hold, and whether they get GPUs."""
    import ray

    known: Any = ray.nodes  # untyped
    nodes = [node["Resources"] for node in known() if node["Alive"]]
    gpus = any(node.get("GPU") for node in nodes)
    room = 0
    for node in nodes:
        cpus = int(node.get("CPU", 0)) // threads
        room += min(cpus, int(node.get("GPU", 0)) * per_gpu) if gpus else cpus
    return room, gpus


class _Tasks:
    def __init__(self, sweep: Sweep, crew: Crew) -> None:
        import ray

        self._ray, self._sweep, self._crew = ray, sweep, crew
        self._tasks: list[Any] = []
        self._done = self._deaths = 0
        room, gpus = slots(crew.per_gpu, crew.threads)
        if not (crew.workers or room):
            raise UserError(
                f"no node of the Ray cluster has {crew.threads} CPUs{' and a GPU' if gpus else ''} "
                "for a worker: lower --threads, or pass --workers to wait for larger nodes"
            )
        self._logs = sweep.path.resolve() / "workers"
        self._logs.mkdir(exist_ok=True)
        self._task = ray.remote(
            num_cpus=crew.threads,
            # Rounded down, so that seven sevenths fit.
            num_gpus=math.floor(_SHARES / crew.per_gpu) / _SHARES if gpus else 0,
            max_calls=1,  # one process per worker, as with other launchers
            max_retries=0,  # `tend` restarts them; Ray would restart a crashing worker forever
            scheduling_strategy="SPREAD",
        )(_work)
        # Workers of other launchers inherit these; paths and plugins may depend on them.
        variables = {k: v for k, v in os.environ.items() if k.startswith("STEPPE_")}
        device = "cuda" if gpus else "cpu"
        self._arguments = self._logs.parent, device, crew, os.getcwd(), variables

    def tend(self, status: Status) -> bool:
        wanted = self._crew.workers or slots(self._crew.per_gpu, self._crew.threads)[0]
        if status.counts["done"] > self._done:
            self._done, self._deaths = status.counts["done"], 0
        for task in self._wait(0):
            if error := self._error(task):
                self._deaths += 1
                if self._deaths > RESTARTS * max(wanted, 1):
                    why = f" (last error: {error}; see the logs in {self._logs})"
                    raise kept_dying(self._sweep, why)
        while len(self._tasks) < wanted:
            self._tasks.append(self._task.remote(*self._arguments))
        return True

    def stop(self, immediately: bool) -> None:
        self._wait(0 if immediately else _STOP_SECONDS)
        for task in self._tasks:
            self._ray.cancel(task)  # raises KeyboardInterrupt in the worker
        # Once all runs are over, no one needs a node that does not answer.
        self._wait(None if immediately else _STOP_SECONDS)

    def _wait(self, timeout: float | None) -> list[Any]:
        """Wait for all tasks; return those that ended, and forget them."""
        if not self._tasks:
            return []
        number = len(self._tasks)
        ended, self._tasks = self._ray.wait(self._tasks, num_returns=number, timeout=timeout)
        return ended

    def _error(self, task: Any) -> str | None:
        """Why an ended task died, or None if it did not."""
        try:
            self._ray.get(task)
        except UserError as error:  # would fail again
            raise UserError(str(getattr(error, "cause", error))) from None
        except self._ray.exceptions.RayError as error:
            return str(error).strip().rpartition("\n")[-1].rstrip(".")
        return None


def _work(path: Path, device: str, crew: Crew, here: str, variables: dict[str, str]) -> None:
    """Run a worker in a process that Ray started."""
    from .worker import work

    os.environ.update(variables)
    with suppress(FileNotFoundError):  # if a relative path needs it, that path's error says so
        os.chdir(here)
    if not (path / "sweep.json").exists():
        raise UserError(
            f"{path} does not exist on {socket.gethostname()}, a node of the Ray cluster: use a "
            "folder that every node sees at the same path"
        )
    log = logging.getLogger("steppe")
    log.setLevel(logging.INFO)
    file = f"ray-{socket.gethostname()}-{os.getpid()}.log"
    log.addHandler(logging.FileHandler(path / "workers" / file))  # the process ends with the task
    try:
        work(path, device, crew.threads, crew.stale)
    except (Interrupted, KeyboardInterrupt):  # from `stop`, which only waits for the task to end
        log.info("stopped")
