"""Accuracy of FAD's gradient differences in each precision, compared with float64.

FAD uses h0 = g1 - g0 and h1 = g3 - g2, differences of nearly equal gradients. The benchmark reports
the cosine similarity between each difference in a given precision and in float64.
"""

import copy
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Result, command, option, track
from task import Task, TaskOptions, prepare
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms.network import Compiled
from steppe.errors import UserError
from steppe.optim import FAD, Bfloat16Warning, search_space
from steppe.training.precision import autocast, settings

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
LOSS_SCALE = 2.0**14  # initial scale for fp16, halved until all gradients are finite


@dataclass(frozen=True, kw_only=True)
class Options(TaskOptions):
    weights: Path | None = option(None, "Weights, as safetensors.", exists=True, dir_okay=False)
    images: Path | None = option(None, "A folder DOMAIN/CLASS/IMAGE (default: built-in digits).")
    compiled: bool = option(False, "Measure compiled code, which folds batch norm.", "--compiled")


def radii() -> tuple[float, ...]:
    found = {r for n in ("fad", "sam", "gam") for r in search_space(n)["rho"].distribution.values}  # type: ignore[union-attr]
    return tuple(sorted(found))


def differences(
    model: nn.Module, x: Tensor, y: Tensor, rho: float, precision: str
) -> tuple[Tensor, Tensor]:
    """Return h0 and h1 as FAD computes them in this precision, flattened, as float64."""
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    while True:
        grads = [grad / scale for grad in _four_gradients(model, x, y, rho, precision, scale)]
        if all(grad.isfinite().all() for grad in grads):
            return grads[1] - grads[0], grads[3] - grads[2]
        if scale < 1.0 or precision != "fp16":
            raise UserError(f"non-finite gradient in {precision} at rho {rho:g}")
        scale /= 2


def _four_gradients(
    model: nn.Module, x: Tensor, y: Tensor, rho: float, precision: str, scale: float
) -> Iterator[Tensor]:
    params = [p for p in model.parameters() if p.requires_grad]
    opt = FAD(torch.optim.SGD(params, lr=0.0), rho=rho, alpha=0.5, beta=0.5)
    with settings(precision, deterministic=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", Bfloat16Warning)  # bfloat16 is measured on purpose
        for phase in opt.phases():
            with phase:
                with autocast(precision, x.device):
                    loss = F.cross_entropy(model(x), y)
                (loss * scale).backward()
                found = [p.grad for p in params if p.grad is not None]
                grad = torch.cat([g.reshape(-1).double() for g in found])
            yield grad
    for p in params:
        p.grad = None


def fidelity(
    task: Task, rhos: Sequence[float], precisions: Sequence[str], compiled: bool = False
) -> list[dict[str, Any]]:
    """Return mean and worst cosine of h0 and h1 over batches, per rho and precision."""
    exact = copy.deepcopy(task.model).double()
    if compiled:  # as in training; float64 stays eager
        task.model.compiled = Compiled(len(task.batches[0][0]))
    cosines: dict[tuple[float, str], list[list[float]]]
    cosines = {key: [] for key in product(rhos, precisions)}
    for rho, (x, y) in track(product(rhos, task.batches), "measuring"):
        h0, h1 = differences(exact, x.double(), y, rho, "fp64")
        for precision in precisions:
            k0, k1 = differences(task.model, x, y, rho, precision)
            pairs = ((h0, k0), (h1, k1))
            cosines[rho, precision].append([float(F.cosine_similarity(*p, dim=0)) for p in pairs])
    rows = []
    for (rho, precision), values in cosines.items():
        row: dict[str, Any] = {"rho": rho, "precision": precision}
        for name, found in zip(("h0", "h1"), zip(*values, strict=True), strict=True):
            row[name] = {"mean": round(statistics.mean(found), 6), "worst": round(min(found), 6)}
        rows.append(row)
    return rows


def measure(options: Options) -> Result:
    task = prepare(options, options.images, options.weights)
    precisions = [p for p in PRECISIONS if p != "tf32" or task.device.type == "cuda"]
    return {
        **task.about,
        "batch": len(task.batches[0][0]),
        "batches": len(task.batches),
        "compiled": options.compiled,
        "cosine to float64": fidelity(task, radii(), precisions, options.compiled),
    }


main = command(Options, measure)
