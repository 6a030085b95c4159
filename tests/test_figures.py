"""The figures of the docs: the script draws what the pages show, and tables have its numbers."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
COLUMNS = {
    "λ max": ("lambda_max", 2),
    "R0": ("zeroth", 3),
    "R1": ("first", 3),
    "accuracy at 75°": ("accuracy", 1),
    "training loss": ("loss", 4),
}


script = load_script(DOCS / "figures.py")


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIGURES / script.NUMBERS).read_text())
    return found


def test_quick_mode_draws_every_figure_for_both_palettes(tmp_path: Path) -> None:
    script.make(script.figure_names(), tmp_path, quick=True)
    expected = {script.file_name(n, p) for n in script.figure_names() for p in script.PALETTES}
    assert {file.name for file in tmp_path.glob("*.svg")} == expected
    for file in tmp_path.glob("*.svg"):
        # Mathematics is set letter by letter.
        words = re.sub(r"\s", "", "".join(ElementTree.parse(file).getroot().itertext()))
        assert re.search("weight|loss|step|accuracy|radius|trace", words), (
            f"{file.name} has no labels"
        )
        own = file.stem.rpartition("-")[2]
        for name, palette in script.PALETTES.items():
            used = [colour in file.read_text() for colour in (palette.ink, *palette.methods)]
            assert (any(used[1:]) and used[0]) if name == own else not any(used), file.name
    kept = json.loads((tmp_path / script.NUMBERS).read_text())["figures"]
    assert set(kept) == set(script.DRAWINGS)

    # A figure that is drawn again leaves the numbers of the others alone, and has the same bytes.
    before = (tmp_path / "ripple-dark.svg").read_bytes()
    (tmp_path / "ripple-dark.svg").unlink()
    script.make(["ripple"], tmp_path, quick=True)
    assert (tmp_path / "ripple-dark.svg").read_bytes() == before
    assert json.loads((tmp_path / script.NUMBERS).read_text())["figures"] == kept


def test_quick_versions_cannot_replace_those_of_the_pages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in FIGURES.iterdir()}
    monkeypatch.setattr(sys, "argv", ["figures.py", "--quick"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--out" in capsys.readouterr().err
    assert before == {file.name: file.stat().st_mtime_ns for file in FIGURES.iterdir()}


def test_pages_show_what_is_drawn_and_nothing_else() -> None:
    shown: set[str] = set()
    for page in DOCS.rglob("*.md"):
        for path, palette in re.findall(
            r"!\[[^\]]+\]\(([^)#]*figures/[^)#]+)(#only-\w+)?\)", page.read_text()
        ):
            file = (page.parent / path).resolve()
            assert file.parent == FIGURES, f"{page.name}: {path}"
            # A picture for one palette must not show on the other.
            assert palette == f"#only-{file.stem.rpartition('-')[2]}", f"{page.name}: {path}"
            shown.add(file.name)
    drawn = {script.file_name(n, p) for n in script.figure_names() for p in script.PALETTES}
    assert shown == drawn
    assert {file.name for file in FIGURES.iterdir()} == drawn | {script.NUMBERS}


def test_files_are_small_and_ask_for_nothing() -> None:
    for file in FIGURES.glob("*.svg"):
        assert file.stat().st_size < 150_000, file.name
        text = file.read_text()
        assert not re.search(r'(href|src)="https?:', text), file.name


def _table(page: str, figure: str) -> dict[str, dict[str, str]]:
    """The table after a mark, as cells by row and column."""
    text = (DOCS / page).read_text()
    (block,) = re.findall(rf"<!-- table: {figure}\b.*?-->\n\n((?:\|.*\n)+)", text)
    head, _, *rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
    ]
    return {row[0].lower(): dict(zip(head, row, strict=True)) for row in rows}


def _cell(value: list[float], digits: int) -> str:
    return " ± ".join(f"{number:.{digits}f}" for number in value)


def test_the_table_says_the_numbers_behind_the_figure(numbers: dict[str, Any]) -> None:
    summary = numbers["figures"]["valley"]["summary"]
    table = _table("explanation/evidence.md", "valley")
    assert set(table) == set(summary)
    for name, row in table.items():
        expected = {
            column: _cell(summary[name][key], digits) for column, (key, digits) in COLUMNS.items()
        }
        expected |= {"optimizer": script.LABELS[name], "passes": str(summary[name]["passes"])}
        assert row.items() <= expected.items()
        assert {"λ max", "accuracy at 75°"} <= set(row)


def test_other_tables_say_theirs(numbers: dict[str, Any]) -> None:
    page, figures = "explanation/flatness.md", numbers["figures"]
    for name, row in _table(page, "radius").items():
        run = figures["radius"]["runs"][name]
        (ball,) = [ball for ball in run["flatness"] if ball["rho"] == script.RHO]
        found = run["eigenvalues"][0], ball["implied by zeroth"], ball["implied by first"]
        assert list(row.values())[1:] == [f"{value:.2f}" for value in found]
    cells = {(cell["alpha"], cell["beta"]): cell for cell in figures["mix"]["cells"]}
    for name, row in _table(page, "mix").items():
        for column, text in list(row.items())[1:]:
            alpha, beta = float(name.partition("= ")[2]), float(column.partition("= ")[2])
            assert text == _cell(cells[alpha, beta]["trace"], 1)


def test_the_correlation_is_that_of_the_runs(numbers: dict[str, Any]) -> None:
    valley = numbers["figures"]["valley"]
    runs = valley["runs"]
    ranks = [
        torch.tensor([sum(o < v for o in column) + sum(o == v for o in column) / 2 for v in column])
        for column in ([r["eigenvalues"][0] for r in runs], [r["accuracy"] for r in runs])
    ]
    slow = float(torch.corrcoef(torch.stack(ranks).double())[0, 1])
    assert valley["rank correlation"] == pytest.approx(slow, abs=1e-6)  # seven digits are kept


@pytest.mark.parametrize("figure", ["minima", "ripple"])
def test_flatness_in_one_dimension_is_what_a_grid_finds(
    figure: str, numbers: dict[str, Any]
) -> None:
    record = numbers["figures"][figure]
    losses = {"sharp": script.two_minima, "flat": script.two_minima}
    losses |= {"smooth": script.smooth, "rippled": script.rippled}
    for name, found in record.items():
        if name == "rho":
            continue
        offsets = torch.linspace(-1, 1, 20_001, dtype=torch.float64) * record["rho"]
        t = (found["at"] + offsets).requires_grad_()
        values = losses[name](t)
        centre = losses[name](torch.tensor(found["at"], dtype=torch.float64))
        (slopes,) = torch.autograd.grad(values.sum(), t)
        zeroth = float(values.detach().max() - centre)
        first = record["rho"] * float(slopes.abs().max())
        # The ascent stops when it gains less than 1e-4 of the value.
        assert found["zeroth"] == pytest.approx(zeroth, rel=1e-3)
        assert found["first"] == pytest.approx(first, rel=1e-3)


def test_the_points_are_those_of_algorithm_1(numbers: dict[str, Any]) -> None:
    record = numbers["figures"]["points"]
    rho = record["rho"]

    def gradient(at: torch.Tensor) -> torch.Tensor:
        w = at.clone().requires_grad_()
        script.bowl(w).backward()
        assert w.grad is not None
        return w.grad

    def climb(v: torch.Tensor) -> torch.Tensor:
        return rho * v / v.norm()

    theta = torch.tensor(script.START, dtype=torch.float64)
    g0 = gradient(theta)
    theta1 = theta + climb(g0)
    g1 = gradient(theta1)
    theta2 = theta + climb(g1 - g0)
    g2 = gradient(theta2)
    theta3 = theta2 + climb(g2)
    g3 = gradient(theta3)
    step = g0 + 0.5 * (0.5 * (g1 - g0) + 0.5 * (g3 - g2))
    expected = torch.stack([theta, theta1, theta2, theta3])
    # Seven digits are kept.
    torch.testing.assert_close(
        torch.tensor(record["points"], dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        torch.tensor(record["step"], dtype=torch.float64), step, rtol=1e-6, atol=1e-6
    )
