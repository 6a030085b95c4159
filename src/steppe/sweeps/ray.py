"""Workers on a Ray cluster: a task for every slot, started again where a node is lost."""

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
from .supervise import RESTARTS, died_again_and_again, supervise
from .sweep import Sweep

_OBJECT_STORE_BYTES = 100 * 2**20  # workers exchange nothing but the word that they are done
_KNOCK_SECONDS = 10
_STOP_SECONDS = 10
_SHARES = 10**4
"""Ray counts parts of a GPU in ten-thousandths."""


@register_launcher("ray")
class Ray:
    """Tasks on a Ray cluster, or on one it starts here; those of a lost node start again elsewhere.

    Nodes that join get workers. Every node must see the sweep's folder and the data at the same
    paths.

    Args:
        address: of a Ray cluster, or auto for one on this machine (default: $RAY_ADDRESS, or a
            cluster that is started here for the sweep).
    """

    def __init__(self, *, address: Annotated[str | None, Option()] = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS", "")

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> Status:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not self.address:
            # Bound to loopback, as Ray is on other systems; read when it is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        mine = not ray.is_initialized()
        if mine:
            _connect(self.address)
        try:
            # It catches signals after `ray.init`, which sets handlers of its own.
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
        if host and port.isdecimal():  # fails at once: Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no Ray cluster can be used at {address!r} ({reason}): start one with "
            "'ray start --head', or leave --address and $RAY_ADDRESS out to use this machine"
        ) from None


def slots(per_gpu: int, threads: int) -> tuple[int, bool]:
    """How many workers the cluster has room for, and whether they have GPUs."""
    import ray

    known: Any = ray.nodes  # which has no types
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
                "for a worker: lower --threads, or give --workers to wait for nodes that have"
            )
        self._logs = sweep.path.resolve() / "workers"
        self._logs.mkdir(exist_ok=True)
        self._task = ray.remote(
            num_cpus=crew.threads,
            # Rounded down: seven sevenths must fit.
            num_gpus=math.floor(_SHARES / crew.per_gpu) / _SHARES if gpus else 0,
            max_calls=1,  # a process for each worker, as elsewhere
            # Started again by `tend`: Ray itself would start one that crashes again for ever.
            max_retries=0,
            scheduling_strategy="SPREAD",
        )(_work)
        # Elsewhere a worker inherits them; paths and plugins may depend on them.
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
                    why = f", the last of {error}; {self._logs} may say more"
                    raise died_again_and_again(self._sweep, why)
        while len(self._tasks) < wanted:
            self._tasks.append(self._task.remote(*self._arguments))
        return True

    def stop(self, immediately: bool) -> None:
        self._wait(0 if immediately else _STOP_SECONDS)
        for task in self._tasks:
            self._ray.cancel(task)  # it hears Ctrl-C
        # When all runs are over, what does not answer is a node that nobody needs.
        self._wait(None if immediately else _STOP_SECONDS)

    def _wait(self, timeout: float | None) -> list[Any]:
        """Waits for all tasks; returns those that have ended, and forgets them."""
        if not self._tasks:
            return []
        number = len(self._tasks)
        ended, self._tasks = self._ray.wait(self._tasks, num_returns=number, timeout=timeout)
        return ended

    def _error(self, task: Any) -> str | None:
        """What a task that has ended died of."""
        try:
            self._ray.get(task)
        except UserError as error:  # a second try would not help
            raise UserError(str(getattr(error, "cause", error))) from None
        except self._ray.exceptions.RayError as error:
            return str(error).strip().rpartition("\n")[-1].rstrip(".")
        return None


def _work(path: Path, device: str, crew: Crew, here: str, variables: dict[str, str]) -> None:
    """A worker, in a process that Ray started."""
    from .worker import work

    os.environ.update(variables)
    with suppress(FileNotFoundError):  # nothing depends on it, or what does will say so
        os.chdir(here)
    if not (path / "sweep.json").exists():
        raise UserError(
            f"{path} is not to be seen from {socket.gethostname()}, a node of the Ray cluster: "
            "use a folder that every node sees at the same path"
        )
    log = logging.getLogger("steppe")
    log.setLevel(logging.INFO)
    file = f"ray-{socket.gethostname()}-{os.getpid()}.log"
    log.addHandler(logging.FileHandler(path / "workers" / file))  # the process ends with the task
    try:
        work(path, device, crew.threads, crew.stale)
    except (Interrupted, KeyboardInterrupt):  # asked to by `stop`, which only waits for the end
        log.info("stopped")
