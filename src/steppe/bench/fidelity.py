"""`steppe bench fidelity`: how much of flatness survives a precision.

FAD acts on h0 = g1 - g0 and h1 = g3 - g2, differences of gradients that are nearly equal. The
cosine between such a difference in some precision and in float64 says what is left of it.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.errors import UserError
from steppe.optim import FAD, Bfloat16Warning, search_space
from steppe.training.precision import autocast, settings

from .record import environment
from .task import Task

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
LOSS_SCALE = 2.0**14
"""The first loss scale tried with fp16; halved until all gradients are finite."""


def radii() -> tuple[float, ...]:
    """Every rho that a search draws, for FAD, SAM or GAM."""
    values = {r for n in ("fad", "sam", "gam") for r in search_space(n)["rho"].distribution.values}  # type: ignore[union-attr]
    return tuple(sorted(values))


def differences(
    model: nn.Module, x: Tensor, y: Tensor, rho: float, precision: str
) -> tuple[Tensor, Tensor]:
    """h0 and h1 as FAD's engine sees them in this precision, flat, in float64."""
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    while True:
        with settings(precision, deterministic=False):
            grads = _four_gradients(model, x, y, rho, scale, autocast(precision, x.device))
        if all(g.isfinite().all() for g in grads):
            break
        if scale < 1.0 or precision != "fp16":
            raise UserError(f"a gradient is not finite in {precision} at rho {rho:g}")
        scale /= 2
    g0, g1, g2, g3 = grads
    return (g1 - g0) / scale, (g3 - g2) / scale


def _four_gradients(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rho: float,
    scale: float,
    forward: AbstractContextManager[object],
) -> list[Tensor]:
    params = [p for p in model.parameters() if p.requires_grad]
    opt = FAD(torch.optim.SGD(params, lr=0.0), rho=rho, alpha=0.5, beta=0.5)
    grads = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Bfloat16Warning)  # it is what is being measured
        for phase in opt.phases():
            with phase:
                with forward:
                    loss = F.cross_entropy(model(x), y)
                (loss * scale).backward()
                found = [p.grad for p in params if p.grad is not None]
                grads.append(torch.cat([g.reshape(-1).double() for g in found]))
    for p in params:
        p.grad = None
    return grads


def fidelity(task: Task, rhos: Sequence[float], precisions: Sequence[str]) -> list[dict[str, Any]]:
    """One row per rho and precision: cosine of h0 and of h1 to float64, mean and worst batch."""
    exact = copy.deepcopy(task.model).double()
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("radii", total=len(rhos) * len(task.batches))
        for rho in rhos:
            cosines: dict[str, list[tuple[float, float]]] = {p: [] for p in precisions}
            for x, y in task.batches:
                h0, h1 = differences(exact, x.double(), y, rho, "fp64")
                for precision in precisions:
                    k0, k1 = differences(task.model, x, y, rho, precision)
                    cosines[precision].append((_cosine(h0, k0), _cosine(h1, k1)))
                progress.advance(bar)
            for precision, pairs in cosines.items():
                row: dict[str, Any] = {"rho": rho, "precision": precision}
                for name, values in zip(("h0", "h1"), zip(*pairs, strict=True), strict=True):
                    row[name] = {"mean": round(statistics.mean(values), 6), "worst": min(values)}
                rows.append(row)
    return rows


def _cosine(a: Tensor, b: Tensor) -> float:
    return round(float(a @ b / (a.norm() * b.norm())), 6)


def measure(task: Task, rhos: Sequence[float]) -> dict[str, Any]:
    """Everything `steppe bench fidelity` reports, as plain values."""
    device = task.batches[0][0].device
    precisions = [p for p in PRECISIONS if p != "tf32" or device.type == "cuda"]
    return {
        "environment": environment(device),
        **task.about,
        "batch": len(task.batches[0][0]),
        "batches": len(task.batches),
        "cosine to float64": fidelity(task, rhos, precisions),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal: a row per rho, h0 and h1 per precision."""
    rows = result["cosine to float64"]
    precisions = list(dict.fromkeys(r["precision"] for r in rows))
    about = f"{result['backbone']} after {result['steps']} steps on {result['data']}"
    table = Table("rho", *precisions, title=f"Mean cosine of h0 / h1 to float64, {about}")
    for rho in dict.fromkeys(r["rho"] for r in rows):
        cells = [r for r in rows if r["rho"] == rho]
        pairs = (f"{r['h0']['mean']:.3f} / {r['h1']['mean']:.3f}" for r in cells)
        table.add_row(f"{rho:g}", *pairs)
    return [table]
