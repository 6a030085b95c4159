"""A report over 10,000 runs of 17 records takes 2 GiB, and no longer for each than over 1,000."""

import itertools
import json
import random
import subprocess
import sys

import pytest

from tests.reports.trees import DOMAINS, config, record, write_run

SCRIPT = """
import json, resource, sys, time
from steppe.reports import build_report, load_runs
began = time.process_time()
report = build_report(load_runs(sys.argv[1]), sys.argv[2], "steppe report")
text = json.dumps(report.to_json()) + json.dumps(report.page_data()) + json.dumps(report.best)
unit = 2**30 if sys.platform == "darwin" else 2**20
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
busy = time.process_time() - began
print(json.dumps([len(report.selected.runs), busy, memory, len(text)]))
"""


def write_sweep(root, n=10_000):
    rng = random.Random(0)
    sets = [t for size in (1, 2) for t in itertools.combinations(DOMAINS, size)]
    axes = (range(5), ("adam", "sgd", "sam", "gam", "fad"), range(3), range(14), sets)
    jobs = itertools.islice(itertools.product(*axes), n)
    for number, (algorithm, optimizer, trial, draw, targets) in enumerate(jobs):
        one = config(
            targets,
            trial,
            draw,
            algorithm={"name": f"A{algorithm}"},
            optimizer={"name": optimizer, "lr": rng.random()},
        )
        records = [record(300 * s, targets, lambda d, p: rng.random()) for s in range(17)]
        for found in records:
            for parts in found["domains"].values():
                for scores in parts.values():
                    more = {"cross_entropy": rng.random(), "calibration_error": rng.random()}
                    scores |= {**more, "images": 1234}
        write_run(root / "runs" / f"run-{number:05}" / "result", one, records)


@pytest.mark.slow
def test_ten_thousand_runs_are_reported_within_the_bar(tmp_path, capsys):
    sizes = (1_000, 10_000)
    for size in sizes:
        write_sweep(tmp_path / str(size), size)
    for selection in ("train-val", "leave-one-out"):
        spent = []
        for size in sizes:
            command = [sys.executable, "-c", SCRIPT, str(tmp_path / str(size)), selection]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs, busy, gigabytes, _ = json.loads(done.stdout)
            with capsys.disabled():
                print(f"\n{runs} runs, {selection}: {busy:.1f} s of a core, {gigabytes:.2f} GiB")
            assert runs == size
            spent.append(busy)
        assert spent[1] < 5 * 10 * spent[0]  # squared, it would be 100 times
        assert gigabytes <= 2
