"""A real Ray cluster on loopback: nodes are killed, and the sweep comes out as it does locally."""

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from steppe.errors import UserError
from steppe.sweeps import Grid, Job, Sweep, Worker, run_sweep, write_plan
from steppe.sweeps.ray import slots
from steppe.training.directory import VOLATILE, RunDirectory
from tests import limits

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install 'steppe[ray]'",
)

# Answers a number of CPUs with the address of the cluster and the process of the new node. In a
# process of its own: the test's would get Ray's threads, signal handlers and warnings.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
options = dict(object_store_memory=100 * 2**20, include_dashboard=False, include_log_monitor=False)
cluster = None
for line in sys.stdin:
    cpus = int(line)
    if cluster is None:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **options})
        node = cluster.head_node
    else:
        node = cluster.add_node(num_cpus=cpus, **options)
    print("node", cluster.address, node.all_processes["raylet"][0].process.pid, flush=True)
"""


class RayCluster:
    """Nodes on 127.0.0.1; whatever was started is killed at the end."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short names
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds it to loopback
            "RAY_TMPDIR": self.folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers that nobody has asked for yet, and that would import all of Ray.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.cluster = self.start([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE)
        self.address = ""

    def start(self, command: list[str], **options) -> subprocess.Popen[str]:
        with open(f"{self.folder}/{len(self.processes)}.err", "w") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                start_new_session=True,
                **options,
            )
        self.processes.append(process)
        return process

    def ask(self, cpus: int) -> None:
        """Asks for a node; the first is the head."""
        print(cpus, file=self.cluster.stdin, flush=True)

    def node(self) -> int:
        """The main process of the node that was asked for."""
        for line in self.cluster.stdout:
            if line.startswith("node "):
                _, self.address, pid = line.split()
                return int(pid)
        raise RuntimeError(Path(self.folder, "0.err").read_text())

    def sweep(self, sweep: Sweep, *options: str) -> subprocess.Popen[str]:
        """Starts `steppe sweep run`."""
        command = [sys.executable, "-m", "steppe", "sweep", "run", str(sweep.path)]
        stale = f"{limits.seconds(8):g}"  # nobody who is alive is silent for so long
        return self.start([*command, "--launcher", "ray", "--stale", stale, *options])

    def kill(self, node: int) -> None:
        """Kills all processes of a node, as a power cut would."""
        for pid in [node, *descendants(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for process in self.processes:
            family = descendants(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head without CPUs: all that happens, happens on nodes that a test adds and may kill."""
    cluster = RayCluster()
    try:
        cluster.ask(cpus=0)
        cluster.node()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def node(cluster: RayCluster) -> Iterator[Callable[[], int]]:
    """Adds nodes with a CPU each, which do not outlive the test."""
    nodes = []

    def add() -> int:
        cluster.ask(cpus=1)
        nodes.append(cluster.node())
        return nodes[-1]

    yield add
    for pid in nodes:
        cluster.kill(pid)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 600):
    deadline = time.monotonic() + limits.seconds(seconds)
    while not (found := condition()):
        assert time.monotonic() < deadline
        assert process.poll() is None, "the sweep ended too early"
        time.sleep(0.02)
    return found


def all_jobs(sweep: Sweep) -> list[Job]:
    return [Job(sweep.folder(name)) for name in sweep.names]


def kinds(job: Job) -> list[str]:
    return [event.kind for event in job.events()]


def claims(sweep: Sweep) -> dict[int, list[str]]:
    """The runs that each process claimed."""
    found: dict[int, list[str]] = {}
    for job in all_jobs(sweep):
        for event in job.events():
            if event.kind == "claim":
                found.setdefault(event.facts["pid"], []).append(job.name)
    return found


def at_work(sweep: Sweep, node: int, wanted: Job | None = None) -> tuple[int, Job] | None:
    """A worker of a node in the middle of a run, or of the one wanted, stopped there; the run."""
    pids = descendants(node)
    for job in all_jobs(sweep) if wanted is None else [wanted]:
        last = job.last()
        if last is None or last.kind != "claim" or last.facts["pid"] not in pids:
            continue
        if list((job.attempt(last.number) / "checkpoint").glob("step-*")):
            os.kill(last.facts["pid"], signal.SIGSTOP)
            if job.last() == last:
                return last.facts["pid"], job
            os.kill(last.facts["pid"], signal.SIGCONT)
    return None


def outcome(sweep: Sweep) -> dict[str, object]:
    """All that may not depend on who carried a run out."""
    found: dict[str, object] = {}
    for job in all_jobs(sweep):
        for record in RunDirectory(job.result).records():
            values = {key: value for key, value in record.items() if key not in VOLATILE}
            found[f"{job.name} {record['step']}"] = json.dumps(values)
        files = sorted((job.result / "checkpoint").rglob("*.safetensors"))
        assert files
        for file in files:
            found[f"{job.name} {file.relative_to(job.result)}"] = file.read_bytes()
    return found


def grid(runs: int, steps: int) -> Grid:
    overrides = ("batch_size=8", "checkpoint_every=10", f"steps={steps}")
    optimizers = ("sgd", "fad")[: runs // 6]
    return Grid(("RotatedDigits",), optimizers=optimizers, trials=1, draws=1, overrides=overrides)


def test_a_node_is_killed_and_every_run_is_done_once_as_it_is_locally(tmp_path, cluster, node):
    local, sweep = (write_plan(grid(12, 40), tmp_path / name) for name in ("local", "ray"))
    assert Worker(local, "cpu").work() == 12
    one, other = node(), node()
    process = cluster.sweep(sweep, "--address", cluster.address)
    victim, job = wait_for(lambda: at_work(sweep, other), process)
    workers = set(descendants(one))
    cluster.kill(other)
    before = [job for job in all_jobs(sweep) if "done" in kinds(job)]
    assert len(before) < 11
    assert process.wait(limits.seconds(900)) == 0
    for each in all_jobs(sweep):
        assert kinds(each).count("done") == 1, each.name
        assert kinds(each)[-1] == "done"
        assert "failed" not in kinds(each)
    assert kinds(job) == ["claim", "claim", "done"]
    by_worker = claims(sweep)
    assert len(by_worker) >= 2
    assert set(by_worker) - {victim} <= workers  # nobody but the node that is left
    assert outcome(sweep) == outcome(local)


def test_a_worker_moves_to_another_node_and_ends_when_asked(tmp_path, cluster, node):
    """What happens after the node's death happens on the one that joins."""
    sweep = write_plan(grid(6, 400), tmp_path / "sweep")
    first = node()
    process = cluster.sweep(sweep, "--address", cluster.address)
    victim, job = wait_for(lambda: at_work(sweep, first), process)
    cluster.kill(first)
    second = node()
    # The dead node's run is taken over once its silence has lasted; until then, others are.
    successor, _ = wait_for(lambda: at_work(sweep, second, job), process)
    process.send_signal(signal.SIGTERM)
    time.sleep(
        limits.seconds(2.5)
    )  # it is asked to end in the middle of the run, and hears it there
    os.kill(successor, signal.SIGCONT)
    assert process.wait(limits.seconds(600)) == 143
    assert successor != victim
    states = [kinds(each)[-1] for each in all_jobs(sweep) if kinds(each)]
    assert states.count("released") == 1  # saved, and free for the next worker at once
    assert "claim" not in states


def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path, monkeypatch):
    sweep = write_plan(grid(6, 1), tmp_path / "sweep")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # the port of 'discard'
    # Ray itself would try for minutes.
    monkeypatch.setattr("ray.init", lambda *args, **options: pytest.fail("Ray was asked"))
    with pytest.raises(
        UserError, match="cannot connect to a Ray cluster at '127.0.0.1:9'.*refused"
    ):
        run_sweep(sweep, "ray")


def test_a_cluster_is_started_where_none_is_named(tmp_path, cluster):
    sweep = write_plan(grid(6, 2), tmp_path / "sweep")
    before = set(marked(cluster))
    process = cluster.sweep(sweep, "--workers", "1")
    assert process.wait(limits.seconds(900)) == 0
    assert {tuple(kinds(job)) for job in all_jobs(sweep)} == {("claim", "done")}
    names = {path.name for path in (sweep.path / "workers").iterdir()}
    assert {f"ray-{socket.gethostname()}-{pid}.log" for pid in claims(sweep)} <= names
    # The driver has told them to end; on a busy machine, they take a moment to.
    deadline = time.monotonic() + limits.seconds(100)
    while set(marked(cluster)) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(marked(cluster)) - before


def marked(cluster: RayCluster) -> list[Path]:
    """The processes that the cluster and its sweeps have."""
    mark = f"RAY_TMPDIR={cluster.folder}".encode()
    return [pid for pid in Path("/proc").glob("[0-9]*") if mark in environment(pid)]


def environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.parametrize(
    ("nodes", "per_gpu", "threads", "wanted"),
    [
        ([{"CPU": 4.0}, {"CPU": 3.0}], 1, 2, (3, False)),  # two and one
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}], 3, 1, (6, True)),  # only where GPUs are
        ([{"CPU": 2.0, "GPU": 4.0}], 2, 1, (2, True)),  # CPUs are short
        ([{"memory": 1.0}], 1, 1, (0, False)),
    ],
)
def test_slots(monkeypatch, nodes, per_gpu, threads, wanted):
    described = [{"Alive": True, "Resources": node} for node in nodes]
    described.append({"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: described))
    assert slots(per_gpu, threads) == wanted
