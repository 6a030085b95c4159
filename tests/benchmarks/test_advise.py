"""`benchmarks/advise.py`: from the command line to a table, and what that says about itself."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import advise
import pytest

from steppe.study.advice.advising import TRUST
from steppe.study.advice.extent import PROBED, Extent
from steppe.study.advice.indicators import INDICATORS
from steppe.study.advice.table import read_table
from tests.study.advice.simulated import table

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.mark.slow  # three sweeps, each with a worker of its own
def test_a_part_of_the_tasks_is_measured(
    carry_out: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One family cannot be held out: its table is written without a regret."""
    monkeypatch.setattr(advise, "FULL", Extent(steps=2, warm_up=1, seeds=1, factors=(1.0,)))
    monkeypatch.setattr(advise, "FACTORS", (1.0,))
    monkeypatch.setattr(advise, "OPTIMIZERS", PROBED)
    path = tmp_path / "table.json"
    words = ("--only", "rotations-few", "--steps", 2, "--seeds", 2, "--workers", 1)
    carry_out(advise, *words, "--table", path, "--out", tmp_path / "runs")
    found = read_table(path)
    (example,) = found.examples
    assert (example.task, example.family) == ("rotations-few", "rotations")
    assert set(example.indicators) == {one.name for one in INDICATORS}
    assert {name: len(scores) for name, scores in example.scores.items()} == dict.fromkeys(
        PROBED, 2
    )
    assert TRUST not in found.facts


def test_the_table_says_how_good_the_advice_is() -> None:
    assert advise.trust(table(0, 0, families=3), ()) is None
    said = advise.trust(table(2, 0, families=4), table(2, 1, families=2))
    assert said is not None
    assert "points below the best optimizer (95% CI" in said
    assert re.search(r"On 8 targets of real images: -?\d+\.\d, adamw \d+\.\d", said)
