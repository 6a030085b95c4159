"""`steppe curvature` as a newcomer would type it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steppe import cli
from steppe.errors import UserError
from steppe.measure import load_measurements
from steppe.training import backbones, make_config, train
from tests.measure.test_measuring import tiny_cnn

QUICK = ["--images", 12, "--tol", 0.1, "--trace-rtol", 1, "--device", "cpu"]


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("curvature-cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "_small_cnn", tiny_cnn)
        for name in ("sgd", "fad"):
            values = {"dataset": "RotatedDigits", "targets": "75", "sources": "0,30", "steps": 3}
            train(make_config({**values, "optimizer": name, "device": "cpu"}), root / name)
        yield root


def test_measure_compare_and_report(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The word 'measure' may be left out, and options may come first.
    measured = invoke("curvature", runs / "sgd", "--top", 3, *QUICK)
    assert "Hessian of the cross-entropy on 12 training images of 0, 30" in " ".join(
        measured.stdout.split()
    )
    for part in ("largest eigenvalue λ_max", "residual", "trace", "R0 (ρ = 0.05)", "Eq. 4"):
        assert part in measured.stdout
    assert f"{runs}/sgd/curvature/train.json: written" in measured.stdout
    lines = measured.stderr.splitlines()
    assert lines[0] == f"curvature of {runs}/sgd"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "images",
        "eigenvalues",
        "trace",
        "flatness",
    ]
    assert re.fullmatch(r"flatness: \d+% done, 0:\d\d:\d\d left", lines[-1])
    fad = invoke("curvature", "--top", 3, "--rho", 0.2, *QUICK, runs / "fad", "--json")
    plain = json.loads(fad.stdout)
    (found,) = load_measurements(runs / "fad").values()
    assert plain == json.loads(json.dumps(found.to_json()))
    assert (plain["flatness"]["rho"], len(plain["eigenvalues"]["values"])) == (0.2, 3)
    out = tmp_path / "figure.svg"
    compared = invoke("curvature", "compare", runs / "sgd", runs / "fad", "--out", out)
    assert "λ_max" in compared.stdout
    assert out.read_text().startswith("<?xml")
    monkeypatch.chdir(tmp_path)
    both = json.loads(invoke("curvature", "compare", runs, "--json").stdout)
    assert (tmp_path / "curvature.svg").exists()
    assert [method["name"] for method in both["methods"]] == ["fad", "sgd"]
    assert both["methods"][0]["spectrum"] == plain["eigenvalues"]["values"]
    (note,) = both["notes"]
    unequal = "R0 and R1 are not compared, because they were measured at ρ = 0.05, 0.2"
    assert note.startswith(unequal)
    chosen = invoke("curvature", "compare", runs, "--target", 75, "--json")
    assert json.loads(chosen.stdout) == both
    page = tmp_path / "page.html"
    invoke("report", runs, "--format", "html", "--out", page)
    assert f'"lambda_max":{plain["eigenvalues"]["values"][0]}' in page.read_text()


def test_compare_tells_runs_of_a_sweep_apart(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"dataset": "RotatedDigits", "optimizer": "sgd", "device": "cpu"}
    for name, target, sources, steps in (
        ("75", "75", "0,30", 2),
        ("75-longer", "75", "0,30", 3),
        ("30", "30", "0,75", 2),
    ):
        options = {"targets": target, "sources": sources, "steps": steps}
        train(make_config({**values, **options}), tmp_path / "sweep" / name)
        invoke("curvature", tmp_path / "sweep" / name, "--top", 1, *QUICK)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="choose runs with one target: --target 75"):
        invoke("curvature", "compare", "sweep")
    assert not Path("curvature.svg").exists()
    compared = invoke("curvature", "compare", "sweep", "--target", 75, "--json")
    (method,) = json.loads(compared.stdout)["methods"]
    assert [run["run"] for run in method["runs"]] == ["sweep/75", "sweep/75-longer"]
    note = "sgd: mean over runs that differ in steps"
    assert json.loads(compared.stdout)["notes"][0] == note
    assert f"note: {note}" in compared.stderr.splitlines()
    monkeypatch.setenv("COLUMNS", "40")
    table = invoke("curvature", "compare", "sweep", "--target", 75).stdout
    (line,) = [line for line in table.splitlines() if line.split()[:1] == ["sgd"]]
    assert line.count(" ± ") == 5  # all numbers of a method stand on one line, however narrow


def test_help_is_that_of_the_group_and_of_each_command() -> None:
    for arguments in (["curvature", "--help"], ["curvature"]):
        result = CliRunner().invoke(cli.app, arguments)
        assert "compare" in result.output
        assert "measure" in result.output
        assert "steppe curvature RUN" in result.output
    measure = invoke("curvature", "measure", "--help").stdout
    assert "--density" in measure
    assert "last|best|step:N" in measure
    assert "--density" not in invoke("curvature", "compare", "--help").stdout


def test_several_runs_give_a_line_each(runs: Path) -> None:
    result = invoke("curvature", runs / "sgd", runs / "fad", "--top", 2, "--json", *QUICK)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    names = ("sgd", "fad")
    kept = [load_measurements(runs / name)["train"].to_json() for name in names]
    assert found == json.loads(json.dumps(kept))


def test_a_density_is_drawn_beside_the_spectrum(runs: Path) -> None:
    result = invoke("curvature", runs / "sgd", "--domain", "30", "--density", "--top", 2, *QUICK)
    figure = runs / "sgd/curvature/30.svg"
    assert f"{figure}: drawn" in result.stderr
    assert "spectral density" in figure.read_text()
    again = invoke("curvature", runs / "sgd", "--domain", "30", "--top", 2, *QUICK)
    assert f"{figure}: removed" in again.stderr
    assert not figure.exists()


def test_a_run_called_compare(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "compare").symlink_to(runs / "sgd")
    monkeypatch.chdir(runs)
    invoke("curvature", "./compare", "--domain", "75", "--top", 1, *QUICK)
    assert (runs / "sgd/curvature/75.json").exists()
    (runs / "compare").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a run"),
        (["sgd", "--domain", "7"], "unknown domain of RotatedDigits '7'"),
        (["sgd", "--which", "best", "--images", "1"], "images=1 is too few"),
        (["sgd", "--alpha", "2"], "alpha"),
        (["compare", "sgd", "fad", "--domain", "45"], "steppe curvature .* --domain 45"),
        (["compare", "sgd", "fad", "--out", "figure.jpg"], r"end in one of \.svg"),
        (["compare", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_exit_with_2(runs: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["steppe", "curvature", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert re.search(f"steppe: .*{message}", capsys.readouterr().err, re.DOTALL)
    assert not Path("figure.jpg").exists()
