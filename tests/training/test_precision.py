"""`auto`: the fastest precision that the stored measurement allows, and the docs say the same."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.errors import UserError
from steppe.optim import optimizer_names, optimizer_spec
from steppe.optim.registry import optimizers
from steppe.options import Option
from steppe.search import Choice
from steppe.training import make_config
from steppe.training.config import Named
from steppe.training.precision import MEASURED, resolve

ROOT = Path(__file__).parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

ROWS = json.loads((ROOT / "benchmarks/fidelity-h200.json").read_text())["cosine to float64"]
RECORD = {(row["rho"], row["precision"]): (row["h0"]["mean"], row["h1"]["mean"]) for row in ROWS}
"""The mean cosines of h0 and of h1, as they were measured."""
RADII = sorted({rho for rho, _ in RECORD})

TWICE = {"adahessian", "gam-exact"}
"""They differentiate gradients."""


def chosen(name: str, **radii: float) -> str:
    """What `auto` stands for on a GPU."""
    return resolve("auto", CUDA, Named(name=name, **radii))


def fastest(name: str, *radii: float) -> str:
    """The same from the record itself, at radii that were measured."""
    order = optimizer_spec(name).order
    for candidate in ("fp16", "tf32"):
        if all(RECORD[rho, candidate][order] >= 0.98 for rho in radii):
            return candidate
    return "fp32"


def test_the_table_is_the_record() -> None:
    assert list(MEASURED) == RADII
    for rho, row in MEASURED.items():
        assert row == {
            name: tuple(round(mean, 3) for mean in RECORD[rho, name]) for name in ("fp16", "tf32")
        }


def searched(name: str) -> dict[str, tuple[float, ...]]:
    """The radii that a search draws, by the option's name."""
    options = optimizer_spec(name).options if optimizer_spec(name).passes > 1 else {}
    grids = {key: option.search for key, option in options.items() if "rho" in key}
    assert all(isinstance(grid, Choice) for grid in grids.values())
    return {option: grid.values for option, grid in grids.items() if isinstance(grid, Choice)}


@pytest.mark.parametrize("name", [name for name in optimizer_names() if searched(name)])
def test_what_a_search_draws_is_true_to_the_gradients(name: str) -> None:
    grids = searched(name)
    order = optimizer_spec(name).order
    for radii in product(*grids.values()):
        found = chosen(name, **dict(zip(grids, radii, strict=True)))
        # ASAM's radius is relative to the weights: nothing was measured for it.
        assert found == ("fp32" if name in {*TWICE, "asam"} else fastest(name, *radii))
        assert all(RECORD[rho, found][order] >= 0.98 for rho in radii)


def docs_table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the guide."""
    _, _, text = (ROOT / "docs/guide/precision.md").read_text().partition(heading)
    lines = text[text.index("\n|") :].split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_docs_say_what_auto_does() -> None:
    header, _, *rows = docs_table("## auto")
    assert header == ["rho", "FAD, GAM", "$h_1$", "SAM", "$h_0$"]
    expected = []
    for rho in RADII:
        flat, sharp = chosen("fad", rho=rho), chosen("sam", rho=rho)
        assert chosen("gam", rho=rho) == flat
        h1, h0 = RECORD[rho, flat][1], RECORD[rho, sharp][0]
        expected.append([f"{rho:g}", flat, f"{h1:.3f}", sharp, f"{h0:.3f}"])
    assert rows == expected


def test_the_docs_say_what_was_measured() -> None:
    header, _, *rows = docs_table("# Precision")
    assert rows == [
        [f"{rho:g}", *(" / ".join(f"{c:.3f}" for c in RECORD[rho, name]) for name in header[1:])]
        for rho in RADII
    ]


@pytest.mark.parametrize("name", optimizer_names())
def test_a_cpu_has_fp32(name: str) -> None:
    spec = optimizer_spec(name)
    optimizer = Named(name=name, **spec.defaults())
    assert resolve("auto", CPU, optimizer) == "fp32"


@pytest.mark.parametrize("name", optimizer_names())
def test_defaults_on_a_gpu(name: str) -> None:
    config = make_config({"dataset": "PACS", "targets": "sketch", "optimizer": name})
    expected = {
        **dict.fromkeys({*TWICE, "asam", "rwp", "gga-l"}, "fp32"),
        **dict.fromkeys({"gam-release", "c-flat"}, "tf32"),  # radii of 0.2
    }
    assert resolve(config.precision, CUDA, config.optimizer) == expected.get(name, "fp16")


@pytest.mark.parametrize(
    ("name", "radii", "expected"),
    [
        ("fad", {"rho": 0.0}, "fp16"),  # nothing is subtracted
        ("fad", {"rho": 0.07}, "fp16"),
        ("fad", {"rho": 0.03}, "tf32"),  # as at 0.01, though 0.05 would do
        ("fad", {"rho": 0.15}, "tf32"),  # as at 0.2, though 0.1 would do
        ("fad", {"rho": 0.3}, "fp32"),
        ("fad", {"rho": 0.009}, "fp32"),
        ("fad", {"rho": 2.1}, "fp32"),
        ("sam", {"rho": 0.7}, "fp16"),
        ("sam", {"rho": 1.5}, "tf32"),
        ("sam", {"rho": 0.009}, "fp32"),
        ("sam", {"rho": 2.1}, "fp32"),
        ("gam-release", {"grad_rho": 0.05, "grad_norm_rho": 0.1}, "fp16"),
        ("gam-release", {"grad_rho": 0.2, "grad_norm_rho": 0.05}, "tf32"),
        ("gam-release", {"grad_rho": 0.05, "grad_norm_rho": 0.2}, "tf32"),
        ("gam-release", {"grad_rho": 0.5, "grad_norm_rho": 0.05}, "fp32"),
        ("gam-release", {"grad_rho": 0.05, "grad_norm_rho": 0.5}, "fp32"),
        ("gam-release", {"grad_rho": 0.0, "grad_norm_rho": 0.05}, "fp16"),
    ],
)
def test_between_and_beyond_what_was_measured(
    name: str, radii: dict[str, float], expected: str
) -> None:
    assert chosen(name, **radii) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"radii": ("radius",)}, "fp32"),  # at 0.5, where h1 needs it
        ({"radii": ("radius",), "order": 0}, "fp16"),
        ({"radii": ()}, "fp32"),  # nothing says how exact its gradients must be
        ({"radii": (), "passes": 1}, "fp16"),
    ],
)
def test_the_entry_says_what_is_a_radius(monkeypatch, facts: dict[str, Any], expected: str) -> None:
    """A method may call its radius as it likes."""
    spec = replace(
        optimizer_spec("fad"), name="mine", options={"radius": Option(default=0.5)}, **facts
    )
    monkeypatch.setitem(optimizers._table, "mine", spec)
    assert chosen("mine") == expected


@pytest.mark.parametrize(
    ("device", "possible"), [(CPU, ("fp32", "bf16")), (CUDA, ("fp32", "tf32", "fp16", "bf16"))]
)
def test_what_is_asked_for_is_not_changed(device: torch.device, possible: tuple[str, ...]) -> None:
    for precision in possible:
        assert resolve(precision, device, Named(name="fad", rho=2.0)) == precision


def test_what_auto_never_chooses_is_still_refused() -> None:
    with pytest.raises(UserError, match="differentiates twice"):
        resolve("fp16", CUDA, Named(name="gam-exact"))
    with pytest.raises(UserError, match="on a CPU, use auto, fp32 or bf16"):
        resolve("tf32", CPU, Named(name="gam-exact"))
