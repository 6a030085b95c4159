"""`steppe bench step`: it times the real loop, from a pack, and its parts add up."""

import pytest
import torch

from steppe.bench import step


def test_parts_add_up() -> None:
    result = step.measure(
        torch.device("cpu"), "resnet18", batch=3, optimizer="sgd", rounds=1, steps=1
    )
    assert result["data"].endswith("packed")
    assert result["batch"] == "3 x 1"
    whole, update = (
        result[name]["median"] for name in ("ms per step", "ms in forward, backward, optimizer")
    )
    waiting = result["ms waiting for data"]["median"]
    assert 0 < waiting < whole - update < 0.6 * whole
    assert abs(result["overhead"]["median"] - (1 - update / whole)) < 1e-3
    assert step.tables(result)[0].row_count == 4


def test_algorithms_are_compared_with_erm() -> None:
    result = step.compare(
        torch.device("cpu"),
        "resnet18",
        batch=6,
        optimizer="sgd",
        rounds=1,
        steps=1,
        precision="fp32",
        names=["CORAL", "MLDG"],
    )
    found = result["algorithms"]
    assert list(found) == ["ERM", "CORAL", "MLDG"]
    assert found["ERM"]["over ERM"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    times = {name: of_one["ms per step"]["median"] for name, of_one in found.items()}
    assert found["MLDG"]["over ERM"]["median"] == pytest.approx(
        times["MLDG"] / times["ERM"], rel=1e-3
    )
    assert step.comparison_tables(result)[0].row_count == 3
