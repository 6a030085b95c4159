"""What is shown of published runs is what their records give."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch

from steppe.study import load_study
from steppe.study.report import to_text
from tests.scripts import load_script

DOCS = Path(__file__).parent.parent / "docs"
PACS = DOCS / "results/pacs"
FIGURES = {"figure.svg", "spectra.svg", "effort.svg", "ablation.svg"}


def test_the_records_give_what_is_stored(tmp_path: Path) -> None:
    stored = json.loads((PACS / "results.json").read_text())
    load_script(DOCS / "results/publish.py").publish(tmp_path, stored["environment"])
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {file.name for file in PACS.iterdir()} - {"records.tar.xz", "first-try.tar.xz"}
    for name in made - FIGURES - {"results.json"}:
        assert (tmp_path / name).read_text() == (PACS / name).read_text()
    again = json.loads((tmp_path / "results.json").read_text())
    assert again.keys() == stored.keys()
    for key, value in again.items():
        assert _rounded(value) == _rounded(stored[key]), key


def _rounded(value: Any) -> Any:
    """Sums may be taken in another order by another version of numpy."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9, abs=1e-9)
    if isinstance(value, dict):
        return {key: _rounded(own) for key, own in value.items()}
    return [_rounded(own) for own in value] if isinstance(value, list) else value


def test_holm_and_the_interval_of_a_correlation() -> None:
    script = load_script(DOCS / "results/publish.py")
    shown = SimpleNamespace(units=6, err=1.0)
    pairs = [
        SimpleNamespace(a="a", b=str(i), difference=d, **vars(shown))
        for i, d in enumerate((0.1, 5.0, -3.0, 2.99))
    ]
    raw = [2 * scipy.stats.t.sf(d, 5) for d in (0.1, 5.0, 3.0, 2.99)]
    # The fourth would be below the third, to which it was second.
    assert 2 * raw[3] < 3 * raw[2]
    expected = {"a - 1": 4 * raw[1], "a - 2": 3 * raw[2], "a - 3": 3 * raw[2], "a - 0": raw[0]}
    assert script.corrected(pairs) == pytest.approx(expected)
    low, high = script._fisher(0.5, 28)
    assert (low, high) == pytest.approx((0.1327, 0.7465), abs=1e-4)  # atanh 0.5 is 0.5493


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_is_adam_without_decay_here(fused: bool) -> None:
    """With the learning rate and the decay of the runs: in float32, to the last bit."""

    def trained(optimizer: type[torch.optim.Adam], decay: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 30)
        opt = optimizer(model.parameters(), lr=1.5e-4, weight_decay=decay, fused=fused)
        for _ in range(100):
            x = torch.randn(8, 30)
            opt.zero_grad()
            (model(x) - x).square().mean().backward()
            opt.step()
        return model.weight.detach()

    ours = trained(torch.optim.AdamW, 1e-4)
    assert torch.equal(ours, trained(torch.optim.Adam, 0.0))
    assert not torch.equal(ours, trained(torch.optim.Adam, 1e-4))
    assert not torch.equal(ours, trained(torch.optim.AdamW, 1e-2))


@pytest.mark.parametrize("name", ["digits", "doodles"])
def test_the_reports_of_studies_are_those_of_their_outcomes(name: str) -> None:
    folder = DOCS / "results/studies" / name
    assert to_text(load_study(folder), "markdown") == (folder / "report.md").read_text()
