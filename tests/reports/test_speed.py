"""The bar: a report over 10,000 runs of 17 records in 10 seconds and 2 GiB."""

import itertools
import json
import random
import subprocess
import sys

import pytest

from tests.reports.trees import DOMAINS, config, record, write_run

SCRIPT = """
import json, resource, sys, time
began = time.perf_counter()
from steppe.reports import build_report, load_runs
report = build_report(load_runs(sys.argv[1]), sys.argv[2], "steppe report")
text = json.dumps(report.to_json()) + json.dumps(report.page_data()) + json.dumps(report.best)
unit = 2**30 if sys.platform == "darwin" else 2**20
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
passed = time.perf_counter() - began
print(json.dumps([len(report.selected.runs), passed, time.process_time(), memory, len(text)]))
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
    write_sweep(tmp_path)
    for selection in ("train-val", "leave-one-out"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), selection]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs, passed, busy, gigabytes, _ = json.loads(done.stdout)
        with capsys.disabled():
            figures = f"{passed:.1f} s ({busy:.1f} s of one core), {gigabytes:.2f} GiB"
            print(f"\n{runs} runs, {selection}: {figures}")
        assert runs == 10_000
        assert busy <= 10  # not what passed: other tests share the cores
        assert gigabytes <= 2
