"""How a run is placed: the layout of its tensors, and the kernels of its optimizer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steppe.algorithms import Objective
from steppe.errors import UserError
from steppe.optim import optimizer_names
from steppe.training import make_config
from steppe.training.config import Named
from steppe.training.processes import Processes
from steppe.training.setup import memory_format, optimizer, part_size

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAST, FIRST = torch.channels_last, torch.contiguous_format

PLAIN = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 2))
"""A convolution of one channel has as many groups as channels, and is not depthwise."""
DEPTHWISE = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 8, 3, groups=4)))


@pytest.mark.parametrize(
    ("net", "size", "number_format", "device", "expected"),
    [
        (PLAIN, 64, "fp32", CPU, LAST),
        (PLAIN, 64, "bf16", CPU, LAST),
        (PLAIN, 63, "fp32", CPU, FIRST),
        (DEPTHWISE, 64, "fp32", CPU, LAST),
        (PLAIN, 64, "fp16", CUDA, LAST),
        (PLAIN, 64, "bf16", CUDA, LAST),
        (PLAIN, 64, "tf32", CUDA, LAST),
        (PLAIN, 64, "fp32", CUDA, FIRST),
        (PLAIN, 63, "fp16", CUDA, FIRST),
        (DEPTHWISE, 64, "fp16", CUDA, LAST),
        (DEPTHWISE, 64, "bf16", CUDA, LAST),
        (DEPTHWISE, 64, "tf32", CUDA, FIRST),
        (DEPTHWISE, 64, "fp32", CUDA, FIRST),
    ],
)
def test_channels_last_where_it_is_faster(
    net: nn.Module,
    size: int,
    number_format: str,
    device: torch.device,
    expected: torch.memory_format,
) -> None:
    assert memory_format(net, size, number_format, device) is expected


FUSED = {"fused": True}
KERNELS: dict[str, dict[str, bool]] = {
    "adam": {**FUSED, "capturable": True},
    "adamw": {**FUSED, "capturable": True},
    "yogi": {},
    "adabelief": {},
    "adahessian": {},
    "genie": {},
}
"""What each optimizer is asked for; those that are not here move the weights with torch's SGD."""


def kernels(wanted: bool, name: str, **options: Any) -> dict[str, bool]:
    """What an optimizer of a run was told about its kernels."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    objective = Objective("main", tuple(model.parameters()))
    built = optimizer(Named(name=name, lr=0.1, **options), objective, model, wanted)
    group = built.param_groups[0]
    return {key: True for key in ("fused", "capturable") if group.get(key)}


@pytest.mark.parametrize("name", optimizer_names())
def test_fused_kernels_where_there_are_any(name: str) -> None:
    assert kernels(True, name) == KERNELS.get(name, FUSED)
    assert kernels(False, name) == {}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("adam", {"foreach": True}, {}),
        ("adam", {"foreach": False}, {}),
        ("adam", {"fused": False}, {"capturable": True}),
        ("adam", {"fused": False, "capturable": False}, {}),
        ("sgd", {"foreach": True}, {}),
        ("sgd", {"fused": False}, {}),
        ("fad", {"foreach": True}, {}),
        ("fad", {"fused": False}, {}),
    ],
)
def test_what_a_user_says_about_kernels_holds(
    name: str, options: dict[str, bool], expected: dict[str, bool]
) -> None:
    assert kernels(True, name, **options) == expected


@pytest.mark.parametrize("optimizer", ["adahessian", "gam-exact"])
def test_what_differentiates_twice_is_refused_in_several_processes(optimizer: str) -> None:
    config = make_config({"dataset": "RotatedDigits", "targets": "75", "optimizer": optimizer})
    alone = Processes(CPU)
    part_size(config, alone)
    with pytest.raises(UserError, match=f"{optimizer} differentiates its gradient.*one process"):
        part_size(config, replace(alone, world=2))
