"""The injector does what it says, the soak's oracles notice a loss, and a short soak finds none."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.errors import UserError
from steppe.sweeps import Job, Worker, read_plan, write_plan
from tests.limits import seconds

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the injector is made for Linux"
)
if sys.platform.startswith("linux"):
    from tests.soak import flips
    from tests.soak.injector import COUNT, Fault, Tally, build, compiler
    from tests.soak.scenarios import Pack, Report, Train, Verdict, Work

ROOT = Path(__file__).parents[2]

# What it did stands in the list that it prints; the numbers are those of the operations.
PROGRAM = r"""
import os, sys
folder, outside = sys.argv[1:]
done = []
def do(work):
    try:
        done.append(work())
    except OSError as error:
        done.append(-error.errno)
    print(done, flush=True)
os.chdir(folder)
with open(outside, "w") as file:                                    # not below the folder
    file.write("x")
do(lambda: os.open("a", os.O_WRONLY | os.O_CREAT) and None)          # 1
a = os.open("a", os.O_WRONLY)                                        # 2
do(lambda: os.write(a, b"12345678"))                                 # 3
do(lambda: os.write(a, b"12345678"))                                 # 4
do(lambda: os.fsync(a))                                              # 5
do(lambda: os.link("a", "b"))                                        # 6
do(lambda: os.mkdir("d"))                                            # 7
do(lambda: os.replace("b", "d/c"))                                   # 8
do(lambda: os.utime("a"))                                            # 9
d = os.open("d" if os.path.isdir("d") else ".", os.O_RDONLY)         # changes nothing
do(lambda: os.unlink("c", dir_fd=d))                                 # 10
do(lambda: os.rmdir("d"))                                            # 11
do(lambda: os.truncate("a", 3))                                      # 12
if not os.fork():
    try:
        os.write(a, b"child")                                        # 13, in another process
    finally:
        os._exit(0)
os.wait()
do(lambda: os.pwrite(a, b"12", 0))                                   # 14
"""
RESULTS = [None, 8, 8, None, None, None, None, None, None, None, None, 2]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if compiler() is None:
        pytest.skip("no C compiler")
    return build(tmp_path_factory.mktemp("injector"))


@pytest.fixture
def inject(library, tmp_path):
    """Runs the program with a fault: its exit code, what it had done, and the tally."""

    def call(fault):
        folder, tally = tmp_path / "folder", Tally(tmp_path / "tally")
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(folder), str(tmp_path / "outside")],
            env={**os.environ, **tally.environment(library, folder, fault)},
            capture_output=True,
            text=True,
            timeout=seconds(60),
        )
        assert not done.stderr
        results = json.loads((done.stdout.splitlines() or ["[]"])[-1].replace("None", "null"))
        return done.returncode, results, tally.read()

    return call


def test_every_operation_below_the_folder_is_counted(inject):
    assert inject(COUNT) == (0, RESULTS, (14, 0, ""))


@pytest.mark.parametrize(
    ("kind", "at", "size", "folder"),
    [
        ("kill:before", 4, 8, False),
        ("kill:half", 4, 12, False),
        ("kill:after", 4, 16, False),
        ("kill:before", 7, 16, False),
        ("kill:after", 7, 16, True),
        ("kill:half", 7, 16, True),  # what writes nothing has no half
    ],
)
def test_a_kill(inject, tmp_path, kind, at, size, folder):
    code, _, (count, fired, what) = inject(Fault(kind, at))
    assert code == -signal.SIGKILL
    assert (count, fired) == (at, at)
    assert what.endswith("/folder/d" if at == 7 else "/folder/a")
    assert (tmp_path / "folder/a").stat().st_size == size
    assert (tmp_path / "folder/d").exists() is folder


@pytest.mark.parametrize(("at", "place"), [(4, 2), (8, 6), (14, 11)])
def test_a_failure_is_one_failure(inject, at, place):
    code, results, (_, fired, _) = inject(Fault("fail:EDQUOT", at))
    assert (code, fired) == (0, at)
    assert results[place] == -errno.EDQUOT
    if at != 8:  # without its rename, others fail too
        assert [r for r in results if r not in (None, 2, 8)] == [-errno.EDQUOT]


def test_a_short_write_and_a_full_disk(inject, tmp_path):
    assert inject(Fault("short", 2))[1] == [None, 4, *RESULTS[2:]]
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "tally").unlink()
    _, results, (_, fired, _) = inject(Fault("full", 4))
    assert fired == 4
    # What needs no room still works, where what it works on is there.
    full, gone = -errno.ENOSPC, -errno.ENOENT
    assert results == [None, 8, 4, None, full, full, gone, None, *results[8:]]
    assert results[-1] == full


def test_a_short_soak_loses_nothing(library, tmp_path):
    answer = tmp_path / "verdicts.json"
    chosen = ("train", "work", "run", "pack", "repack", "report")
    words = [word for name in chosen for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--faults", "5", "--json", str(answer), *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds(600),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [Verdict.from_json(values) for values in json.loads(answer.read_text())]
    assert {verdict.scenario for verdict in verdicts} == set(chosen)
    assert sum(bool(verdict.what) for verdict in verdicts) >= 20  # most met their fault
    assert not list(tmp_path.glob("steppe-soak-*"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A scenario whose reference is there."""
    scenario = Work(tmp_path_factory.mktemp("sweep"))
    path = scenario.reference / "sweep"
    path.parent.mkdir(parents=True)
    assert Worker(write_plan(Work.grid, path), "cpu").work() == 2
    return scenario


@pytest.fixture
def disturbed(sweep, tmp_path):
    shutil.copytree(sweep.reference, tmp_path / "place")
    return tmp_path / "place"


def first_job(place):
    plan = read_plan(place / "sweep")
    return Job(plan.folder(plan.names[0]))


def flip_weights(job):
    flips.flip(job.result / "checkpoint/step-000002/model.safetensors", 8 * 1000)


def drop_a_record(job):
    path = job.result / "records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def commit_again(job):
    job.note(3, "claim")
    job.note(4, "done", attempt=3)


def lose_the_result(job):
    shutil.rmtree(job.result)


def lose_the_end(job):
    max((job.path / "events").iterdir()).unlink()


def not_finished(job):
    (job.result / "state").write_text("running\n")


def leave_an_attempt(job):
    job.attempt(1).mkdir()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda job: None, None),
        (flip_weights, "differs"),
        (drop_a_record, "differs"),
        (commit_again, "doubled"),
        (lose_the_result, "lost"),
        (lose_the_end, "lost"),
        (not_finished, "lost"),
        (leave_an_attempt, "junk"),
    ],
)
def test_the_oracle_of_sweeps_notices(sweep, disturbed, damage, found):
    damage(first_job(disturbed))
    verdict = Verdict("work", COUNT)
    sweep.check(disturbed, verdict)
    kinds = ("lost", "doubled", "differs", "junk")
    assert [kind for kind in kinds if getattr(verdict, kind)] == ([found] if found else [])
    assert verdict.bad == (found not in (None, "junk"))


def test_the_oracle_of_train_notices(sweep, disturbed, tmp_path):
    scenario = Train(tmp_path)
    for place in (scenario.reference, disturbed):
        shutil.copytree(first_job(sweep.reference).result, place / "run")
    same, other = Verdict("train", COUNT), Verdict("train", COUNT)
    scenario.check(disturbed, same)
    assert not same.bad
    flips.flip(disturbed / "run/checkpoint/step-000002/state.safetensors", 8 * 200)
    scenario.check(disturbed, other)
    assert other.differs == ["run: step-000002/state.safetensors"]


def test_the_oracles_of_packs_and_reports_notice(tmp_path):
    scenario = Report(tmp_path)
    scenario.reference.mkdir(parents=True)
    (scenario.reference / "report.html").write_text('the new one, "made": "today"')
    place = tmp_path / "place"
    scenario.start(place)
    for text, lost in (
        (Report.OLD, False),
        ('the new one, "made": "tomorrow"', False),
        (Report.OLD[:-1], True),
        ("", True),
    ):
        (place / "report.html").write_text(text)
        verdict = Verdict("report", COUNT)
        scenario.look(place, verdict)
        assert bool(verdict.lost) is lost
    pack = Pack(tmp_path)
    pack.base.mkdir()
    pack.prepare_base()
    pack.start(pack.reference)
    done = subprocess.run(
        [sys.executable, "-m", "steppe", *pack.words],
        cwd=pack.reference,
        capture_output=True,
        timeout=seconds(100),
    )
    assert done.returncode == 0, done.stderr
    shutil.copytree(pack.reference, tmp_path / "packed")
    for damaged in (False, True):
        if damaged:
            flips.flip(tmp_path / "packed/images.pack/a-000.bin", 80)
        verdict = Verdict("pack", COUNT)
        pack.look(tmp_path / "packed", verdict)
        assert bool(verdict.lost) is damaged


def test_flips_are_told_apart(tmp_path):
    path = tmp_path / "value.json"
    text = '{"value": 1, "note": 1}'
    path.write_text(text)

    def look(root):
        value = json.loads((root / "value.json").read_text())["value"]
        if value == 3:
            raise UserError("3 is too much")
        return flips.Seen(value)

    group = flips.Group("value", tmp_path, "*.json", look)
    expected = group.look(tmp_path)
    found = {}
    for name, byte, bit in (
        ("harmless", 21, 1),  # a value that nobody looks at
        ("SILENT", 10, 2),
        ("told", 10, 1),
        ("TRACEBACK", 3, 0),
    ):
        restore = flips.flip(path, 8 * byte + bit)
        found[name] = flips.judge(group, expected)[0]
        restore()
    assert path.read_text() == text
    assert found == {name: name for name in found}
