"""Workers on a Ray cluster: a task for every slot, started again where a node is lost."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from steppe import strangers
from steppe.errors import Interrupted, RunError, UserError
from steppe.training.interrupts import Interrupts

from .local import DEATHS, LOOK_SECONDS
from .plan import Sweep
from .status import Status, look
from .worker import work

_OBJECT_STORE_BYTES = 100 * 2**20  # workers exchange nothing but the word that they are done
_KNOCK_SECONDS = 10
_SHARES = 10**4
"""Ray counts parts of a GPU in ten-thousandths."""


def run_ray(
    sweep: Sweep,
    *,
    workers: int | None = None,
    per_gpu: int = 1,
    threads: int = 1,
    stale: float = 60.0,
    address: str | None = None,
    show: Callable[[Status], None] = lambda status: None,
) -> Status:
    """Run a sweep to its end with workers on a Ray cluster.

    A worker whose node is lost is started again on another one, and nodes that join get workers.
    Every node must see the sweep's folder and the data at the same paths.

    Args:
        sweep: the sweep.
        workers: how many; as many as the cluster has slots unless given.
        per_gpu: workers that share a GPU, where the cluster has GPUs.
        threads: of each worker, on a CPU; Ray sets as many CPUs aside for it.
        stale: seconds after which a silent worker is taken for dead.
        address: the cluster's, or `auto` for one that runs on this machine; ``$RAY_ADDRESS`` unless
            given. Without either, a cluster is started on this machine for the sweep.
        show: is given the status, again and again.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        # What Ray does on other systems, and reads when it is imported: it is bound to loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    mine = not ray.is_initialized()
    if mine:
        _connect(address)
    try:
        return _run(sweep, workers, per_gpu, threads, stale, show)
    finally:
        if mine:
            ray.shutdown()


def _connect(address: str | None) -> None:
    import ray

    if not address:
        ray.init(
            "local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        return
    try:
        _knock(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no Ray cluster can be used at {address!r} ({reason}): start one with "
            "'ray start --head', or leave --address and $RAY_ADDRESS out to use this machine"
        ) from None


def _knock(address: str) -> None:
    """Fails at once where nothing listens: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


def slots(per_gpu: int, threads: int) -> tuple[int, bool]:
    """How many workers the cluster has room for, and whether they have GPUs."""
    import ray

    known: Callable[[], list[dict[str, Any]]] = ray.nodes
    nodes = [node["Resources"] for node in known() if node["Alive"]]
    gpus = any(node.get("GPU") for node in nodes)
    room = 0
    for node in nodes:
        cpus = int(node.get("CPU", 0)) // threads
        room += min(cpus, int(node.get("GPU", 0)) * per_gpu) if gpus else cpus
    return room, gpus


def _run(
    sweep: Sweep,
    workers: int | None,
    per_gpu: int,
    threads: int,
    stale: float,
    show: Callable[[Status], None],
) -> Status:
    import ray

    room, gpus = slots(per_gpu, threads)
    if not (workers or room):
        raise UserError(
            f"no node of the Ray cluster has {threads} CPUs{' and a GPU' if gpus else ''} for a "
            "worker: lower --threads, or give --workers to wait for nodes that have"
        )
    logs = sweep.path.resolve() / "workers"
    logs.mkdir(exist_ok=True)
    task = ray.remote(
        num_cpus=threads,
        # Rounded down: seven sevenths must fit.
        num_gpus=math.floor(_SHARES / per_gpu) / _SHARES if gpus else 0,
        max_calls=1,  # a process for each worker, as elsewhere
        # Started again below: Ray itself would start one that crashes again for ever.
        max_retries=0,
        scheduling_strategy="SPREAD",
    )(_work)
    surroundings = os.getcwd(), {k: v for k, v in os.environ.items() if k.startswith("STEPPE_")}
    arguments = logs.parent, "cuda" if gpus else "cpu", threads, stale, *surroundings
    tasks: list[Any] = []
    done = deaths = 0
    with Interrupts() as interrupts:  # after `ray.init`, which sets handlers of its own
        try:
            while True:
                status = look(sweep, stale)
                show(status)
                if status.over or interrupts.number is not None:
                    break
                wanted = workers or slots(per_gpu, threads)[0]
                if status.counts["done"] > done:
                    done, deaths = status.counts["done"], 0
                ended, tasks = _ended(tasks)
                for error in filter(None, map(_error, ended)):
                    deaths += 1
                    if deaths > DEATHS * max(wanted, 1):
                        raise RunError(
                            f"the workers died again and again, the last of {error}; {logs} may "
                            "say more; fix it, then: "
                            + strangers.command("steppe", "sweep", "run", sweep.path)
                        )
                while len(tasks) < wanted:
                    tasks.append(task.remote(*arguments))
                time.sleep(LOOK_SECONDS)
        finally:
            _stop(tasks, immediately=interrupts.number is not None)
        if interrupts.number is not None:
            raise Interrupted(interrupts.number)
    return look(sweep, stale)


def _ended(tasks: list[Any], timeout: float | None = 0) -> tuple[list[Any], list[Any]]:
    """Tasks that have ended, and those that have not."""
    import ray

    return ray.wait(tasks, num_returns=len(tasks), timeout=timeout) if tasks else ([], [])


def _error(task: Any) -> str | None:
    """What a task that has ended died of."""
    import ray

    try:
        ray.get(task)
    except UserError as error:  # a second try would not help
        raise UserError(str(getattr(error, "cause", error))) from None
    except ray.exceptions.RayError as error:
        return str(error).strip().rpartition("\n")[-1].rstrip(".")
    return None


def _stop(tasks: list[Any], immediately: bool) -> None:
    """Waits for workers to end by themselves, or has them save and end."""
    import ray

    _, alive = _ended(tasks, timeout=0 if immediately else 10)
    for task in alive:
        ray.cancel(task)  # it hears Ctrl-C
    # When all runs are over, what does not answer is a node that nobody needs.
    _ended(alive, timeout=None if immediately else 10)


def _work(
    path: Path, device: str, threads: int, stale: float, here: str, variables: dict[str, str]
) -> None:
    """A worker, in a process that Ray started."""
    # Elsewhere a worker inherits them; paths and plugins may depend on them.
    os.environ.update(variables)
    with suppress(FileNotFoundError):  # nothing depends on it, or what does will say so
        os.chdir(here)
    if not (path / "sweep.json").exists():
        raise UserError(
            f"{path} is not to be seen from {socket.gethostname()}, a node of the Ray cluster: "
            "use a folder that every node sees at the same path"
        )
    log = logging.getLogger("steppe")
    handler = logging.FileHandler(
        path / "workers" / f"ray-{socket.gethostname()}-{os.getpid()}.log"
    )
    handler.setLevel(logging.INFO)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        work(path, device, threads, stale)
    except (Interrupted, KeyboardInterrupt):  # asked to by `_stop`, which only waits for the end
        log.info("stopped")
    finally:
        log.removeHandler(handler)
        handler.close()
