"""The demo: real runs of every optimizer, a table as in the paper, and a report."""

import statistics
from pathlib import Path

import pytest

from steppe import demo
from steppe.domains import dataset_spec
from steppe.optim import optimizer_spec
from steppe.training import RunDirectory, select


def test_the_demo_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = demo.run(tmp_path, dataset="RotatedDigits", steps=3, seeds=2)
    printed = capsys.readouterr().out
    assert f"report: {report.resolve()}" in printed
    page = report.read_text()
    assert page.count("<img") == 2
    assert "http://" not in page.replace("http://www.w3.org", "")
    for name in demo.OPTIMIZERS:
        runs = [tmp_path / f"{name}-75-{seed}" for seed in range(2)]
        assert all(RunDirectory(run).state == "done" for run in runs)
        best = [select(RunDirectory(run).records()) for run in runs]
        accuracies = [100 * record["domains"]["75"]["test"]["accuracy"] for record in best]
        error = statistics.pstdev(accuracies) / 2**0.5
        cell = f"{statistics.mean(accuracies):.1f} ± {error:.1f}"
        assert cell.replace(" ", "") in printed
        assert cell in page


def test_the_rows_of_the_table() -> None:
    spec = dataset_spec("RotatedDigits")
    results = [
        demo.Result(demo.Job(name, target, seed, Path()), 10.0 * seed + i, 2.0 + i)
        for i, name in enumerate(demo.OPTIMIZERS)
        for target in spec.domains[:2]
        for seed in (0, 1)
    ]
    cells = demo.rows(spec.domains[:2], results)
    assert list(cells) == ["adam", "sgd", "sam", "gam", "fad"]
    assert cells["sam"] == ["7.0 ± 3.5", "7.0 ± 3.5", "7.0 ± 3.5", "2", "4.0"]
    assert [row[3] for row in cells.values()] == [
        str(optimizer_spec(name).passes) for name in demo.OPTIMIZERS
    ]
