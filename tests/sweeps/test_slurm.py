"""The script for Slurm, and a real Slurm that runs it while tasks are cancelled."""

import os
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from steppe.errors import UserError
from steppe.sweeps import Crew, Grid, Job, Sweep, look, run_sweep, write_plan
from tests import processes
from tests.limits import seconds
from tests.sweeps.slurm_cluster import SlurmCluster, missing

GRID = Grid(
    ("RotatedDigits",),
    optimizers=("sgd",),
    trials=1,
    draws=1,
    overrides=("batch_size=8", "checkpoint_every=10", "steps=60"),
)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return write_plan(GRID, tmp_path / "digits, 100% mine")


def submit(sweep: Sweep, crew: Crew | None = None, **options) -> str:
    return run_sweep(sweep, "slurm", crew, **options)


def lines(sweep: Sweep) -> list[str]:
    return (sweep.path / "slurm/sweep.sbatch").read_text().splitlines()


def test_the_script_says_what_was_asked_for(sweep):
    said = submit(
        sweep,
        Crew(threads=2, stale=30),
        sbatch=("--partition=gpu", "--gres=gpu:a100:1"),
        dry_run=True,
    )
    script = f"{sweep.path}/slurm/sweep.sbatch"
    assert said == f"{script}: 6 workers; submit them with: sbatch '{script}'"
    options = [line.removeprefix("#SBATCH ") for line in lines(sweep) if "#SBATCH" in line]
    assert options == [
        "--job-name=steppe-digits__100__mine",
        "--array=0-5",
        f'--output="{sweep.path.parent}/digits, 100%% mine/slurm/%A_%a.log"',
        "--open-mode=append",
        "--ntasks=1",
        "--cpus-per-task=2",
        "--signal=B:TERM@60",
        "--requeue",
        "--partition=gpu",
        "--gres=gpu:a100:1",
    ]
    assert lines(sweep)[-1] == (
        f"exec {sys.executable} -m steppe sweep work '{sweep.path}' --device auto --threads 2 "
        "--stale 30"
    )


@pytest.mark.parametrize(
    ("workers", "per_gpu", "sbatch", "array", "gpu"),
    [
        (5, 2, (), "0-2", ["--gpus-per-node=1"]),
        (4, 2, ("-G1",), "0-1", ["-G1"]),
        (1, 1, (), "0-0", []),
    ],
)
def test_workers_that_share_a_gpu_share_a_task(sweep, workers, per_gpu, sbatch, array, gpu):
    submit(sweep, Crew(workers, per_gpu, threads=3), sbatch=sbatch, dry_run=True)
    text = lines(sweep)
    assert f"#SBATCH --array={array}" in text
    assert f"#SBATCH --cpus-per-task={3 * per_gpu}" in text
    assert [line for line in text if "gpus" in line or "-G" in line] == [
        f"#SBATCH {option}" for option in gpu
    ]


def test_the_number_of_workers_is_bounded_and_follows_what_is_left(tmp_path):
    many = write_plan(Grid(("RotatedDigits",), trials=1, draws=4), tmp_path / "many")
    assert ": 16 workers (without GPUs" in submit(many, dry_run=True)
    for name in many.names[:20]:
        Job(many.folder(name)).note(1, "cancelled")
    assert ": 4 workers (without GPUs" in submit(many, dry_run=True)
    for name in many.names[20:]:
        Job(many.folder(name)).note(1, "cancelled")
    assert submit(many).endswith("no runs are left")


def test_what_cannot_be_submitted_is_said(tmp_path, sweep, monkeypatch):
    with pytest.raises(UserError, match="--sbatch=time=1 is not an sbatch option"):
        submit(sweep, sbatch=("time=1",))
    with pytest.raises(UserError, match="is not an sbatch option"):
        submit(sweep, sbatch=("--comment=a\nrm -rf .",))
    odd = write_plan(GRID, tmp_path / 'a "sweep"')
    with pytest.raises(UserError, match="choose a folder without quotes"):
        submit(odd, dry_run=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch was not found: .*\(--dry-run only writes it\)"):
        submit(sweep)
    assert lines(sweep)  # written before
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: x' >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match="sbatch rejected .*: sbatch: error: invalid partition: x"):
        submit(sweep)


needs_slurm = pytest.mark.skipif(
    bool(missing()), reason=f"not installed: {', '.join(missing())} (apt: slurm-wlm munge)"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def run(cluster: SlurmCluster, sweep: Sweep, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Submits workers with the command line; returns the job's number."""
    numbers = []

    def submit(*options: str) -> str:
        words = ("sweep", "run", sweep.path, "--launcher", "slurm", *options)
        command = processes.Steppe(*words, folder=tmp_path, variables=cluster.environment)
        assert command.wait() == 0, command.stderr
        assert f"steppe sweep status '{sweep.path}' --watch" in command.stdout
        numbers.append(command.stdout.partition("job ")[2].partition(":")[0])
        return numbers[-1]

    yield submit
    cluster.run("scancel", *numbers)  # what a test that failed has left


def kinds(job: Job) -> list[str]:
    return [event.kind for event in job.events()]


def all_jobs(sweep: Sweep) -> list[Job]:
    return [Job(sweep.folder(name)) for name in sweep.names]


def wait_for(condition: Callable[[], object], sweep: Sweep):
    deadline = time.monotonic() + seconds(900)
    while not (found := condition()):
        logs = "".join(log.read_text() for log in (sweep.path / "slurm").glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.02)
    return found


def at_work(sweep: Sweep, number: int = 1) -> tuple[str, list[Job]] | None:
    """An array task with so many runs in the middle, and the runs; its workers are stopped."""
    found: dict[str, list[Job]] = {}
    for job in all_jobs(sweep):
        last = job.last()
        if last is None or last.kind != "claim":
            continue
        pid = last.facts["pid"]
        if not any((job.attempt(last.number) / "checkpoint").glob("step-*")):
            continue
        with suppress(OSError):  # it has just ended
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            task = next(v for v in variables if v.startswith(b"SLURM_ARRAY_TASK_ID="))[20:].decode()
            os.kill(pid, signal.SIGSTOP)
            if job.last() != last:
                os.kill(pid, signal.SIGCONT)
                continue
            found.setdefault(task, []).append(job)
            if len(found[task]) == number:
                return task, found[task]
    return None


def check_all_done_once(sweep: Sweep, cancelled: list[Job]) -> None:
    assert look(sweep).counts["done"] == 6
    for job in all_jobs(sweep):
        assert Counter(kinds(job))["done"] == 1
        assert kinds(job)[-1] == "done"
    for job in cancelled:
        assert kinds(job) == ["claim", "released", "claim", "done"]
        assert "interrupted by SIGTERM" in (job.result / "log.txt").read_text()


@needs_slurm
def test_a_task_is_cancelled_and_another_takes_its_run(cluster, sweep, run):
    number = run("--workers", "2", "--sbatch=--job-name=mine")
    task, jobs = wait_for(lambda: at_work(sweep), sweep)
    assert cluster.run("squeue", "-h", "-o", "%j").split() == ["mine", "mine"]
    cluster.run("scancel", f"{number}_{task}")
    # Well before the minute after which a silent worker is taken for dead.
    wait_for(lambda: look(sweep).over, sweep)
    wait_for(cluster.idle, sweep)
    check_all_done_once(sweep, jobs)
    logs = {path.name: path.read_text() for path in (sweep.path / "slurm").glob("*.log")}
    assert set(logs) == {f"{number}_0.log", f"{number}_1.log"}
    assert f"{jobs[0].name}: done" in logs[f"{number}_{1 - int(task)}.log"]


@needs_slurm
def test_two_workers_in_one_task_both_give_their_runs_back(cluster, sweep, run):
    number = run("--workers", "2", "--per-gpu", "2")
    assert "gpu" in cluster.run("squeue", "-h", "-o", "%b")
    _, jobs = wait_for(lambda: at_work(sweep, 2), sweep)
    cluster.run("scancel", number)
    wait_for(cluster.idle, sweep)
    assert [kinds(job)[-1] for job in jobs] == ["released", "released"]
    run("--workers", "2", "--per-gpu", "2")
    wait_for(cluster.idle, sweep)
    check_all_done_once(sweep, jobs)
