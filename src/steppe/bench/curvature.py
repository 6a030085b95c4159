"""`steppe bench curvature`: the top eigenvalues against the tools that people use.

The same network, data and number format for all, on the same device. The rivals are SciPy's `eigsh`
(ARPACK) on curvlinops' Hessian, and PyHessian's deflated power iteration. Residuals are not taken
from the solvers: they are computed afterwards, for everyone by the same products, in float64 where
the network is small enough.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.curvature import HessianOperator, top_eigenvalues
from steppe.errors import UserError, unknown

from . import task as tasks
from .record import environment
from .task import SMALL, Task

RESIDUAL = 1e-3
"""What a residual may be, relative to the largest eigenvalue: everyone is asked for this."""
RIVALS = ("eigsh", "pyhessian")
EXACT = 1_000_000
"""Parameters up to which residuals are checked in float64."""
FEW = 10
"""Eigenvalues that power iteration is asked for; the others take it too long."""


@dataclass(frozen=True)
class Found:
    """What a solver returned: values, vectors in columns, and what it took."""

    values: Tensor
    vectors: Tensor
    seconds: float
    products: int | None


Solver = Callable[[int, float], Found]
"""Finds some eigenpairs to a tolerance of its own kind."""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss that is differentiated."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def prepare(device: torch.device, backbone: str, steps: int, batch: int, batches: int) -> Task:
    """A network trained on built-in data: digits for the small one, enlarged doodles else."""
    if backbone == SMALL:
        return tasks.prepare(device, backbone, None, None, steps, batch, batches)
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        images = Path(home) / "enlarged doodles"
        tasks.write_doodles(images)
        return tasks.prepare(device, backbone, None, images, steps, batch, batches)


class _TooSlowError(Exception):
    """A rival was stopped at the limit."""

    def __init__(self, seconds: float, products: int) -> None:
        super().__init__()
        self.seconds, self.products = seconds, products


def check_options(rivals: Sequence[str], limit: float) -> None:
    """Refuses before the training what would be refused after it."""
    for rival in rivals:
        if rival not in RIVALS:
            raise UserError(unknown("rival", rival, RIVALS))
    if not limit > 0:
        raise UserError(f"limit={limit:g}: give a positive number of seconds")


def measure(
    task: Task,
    top: int = 50,
    rounds: int = 3,
    rivals: Sequence[str] = RIVALS,
    limit: float = math.inf,
) -> dict[str, Any]:
    """Everything `steppe bench curvature` reports, as plain values.

    Args:
        task: the network and the data.
        top: how many eigenvalues.
        rounds: how often each solver solves.
        rivals: of `RIVALS`.
        limit: seconds after which `eigsh` is stopped, and its time a lower bound.
    """
    check_options(rivals, limit)
    device = task.batches[0][0].device
    n = sum(p.numel() for p in task.model.parameters())
    few = min(FEW, top)
    check = _Check(task, exact=n <= EXACT)
    _steppe(task, 1, "LA")  # what is imported or chosen at the first product is not timed
    plan: list[tuple[str, int, Callable[[], Found]]] = [
        ("steppe", top, lambda: _steppe(task, top, "LA")),
    ]
    if "eigsh" in rivals:
        eigsh = _eigsh(task, limit)
        plan += [("eigsh", top, lambda: _reaching(check, "eigsh", eigsh, top, _relative(rows)))]
    if "pyhessian" in rivals:
        power = _pyhessian(task)
        plan += [
            ("steppe, by magnitude", few, lambda: _steppe(task, few, "LM")),
            ("pyhessian", few, lambda: _reaching(check, "PyHessian", power, few, RESIDUAL)),
        ]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in plan}
    peaks: dict[str, float] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("solving", total=rounds * len(plan))
        for _ in range(rounds):
            for name, k, solve in plan:
                progress.update(bar, description=f"{name}, top {k}")
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                try:
                    found = solve()
                except _TooSlowError as stopped:
                    rows[name].append(
                        {"seconds": stopped.seconds, "products": stopped.products, "stopped": True}
                    )
                else:
                    if device.type == "cuda":
                        peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30
                    rows[name].append(_row(found, check))
                    del found
                progress.advance(bar)
    result: dict[str, Any] = {
        "environment": environment(device),
        **task.about,
        "images": sum(len(y) for _, y in task.batches),
        "batches": len(task.batches),
        "parameters": n,
        "residuals checked in": str(check.dtype).removeprefix("torch."),
        "solvers": [
            {"solver": name, "eigenvalues": k, **_summary(rows[name]), **_peak(peaks, name)}
            for name, k, _ in plan
        ],
    }
    pairs = {"eigsh": "steppe", "pyhessian": "steppe, by magnitude"}
    every = {
        f"{ours}, top {k}, over {rival}": _ratio(rows[ours], rows[rival])
        for rival, ours in pairs.items()
        for name, k, _ in plan
        if name == rival
    }
    result["ratios"] = {name: ratio for name, ratio in every.items() if ratio is not None}
    return result


def _relative(rows: dict[str, list[dict[str, Any]]]) -> float:
    """ARPACK's tolerance, relative to each eigenvalue, that asks the smallest for `RESIDUAL`."""
    ours = rows["steppe"][-1]
    return float(min(RESIDUAL * ours["lambda_max"] / abs(ours["smallest"]), 0.1))


def _peak(peaks: dict[str, float], name: str) -> dict[str, float]:
    return {"peak GiB": round(peaks[name], 2)} if name in peaks else {}


def _row(found: Found, check: _Check) -> dict[str, Any]:
    scale = float(found.values.abs().max())
    return {
        "seconds": found.seconds,
        "products": found.products,
        "lambda_max": float(found.values.max()),
        "smallest": float(found.values.min()),
        "residual": float(check.residuals(found).max()) / scale,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in rows]
    return {
        "seconds": {
            "median": round(statistics.median(seconds), 3),
            "min": round(min(seconds), 3),
            "max": round(max(seconds), 3),
        },
        "products": rows[0]["products"],
        **_exactness(rows),
    }


def _exactness(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if any("stopped" in row for row in rows):
        return {"stopped": True}  # the seconds are a lower bound
    return {
        "worst residual over lambda_max": float(f"{max(row['residual'] for row in rows):.2e}"),
        "lambda_max": float(f"{rows[0]['lambda_max']:.8g}"),
        "smallest": float(f"{rows[0]['smallest']:.8g}"),
    }


def _ratio(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Our time over theirs, round by round; nothing where they were stopped before we were done."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(ours, theirs, strict=True)]
    stopped = any("stopped" in row for row in theirs)
    if stopped and max(ratios) > 1:
        return None
    return {
        "median": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
        **({"upper bound": True} if stopped else {}),
    }


class _Check:
    """Residuals, by products of their own."""

    def __init__(self, task: Task, exact: bool) -> None:
        model, batches = task.model, task.batches
        if exact:
            model = copy.deepcopy(model).double()
            batches = [(x.double(), y) for x, y in batches]
        # Not kept: its memory must not count as a solver's.
        self._op = HessianOperator(model, loss, batches, keep_graphs=False)
        self.dtype = self._op.dtype

    def residuals(self, found: Found) -> Tensor:
        """The norms of H v - value v, for unit vectors v."""
        lengths = []
        for value, vector in zip(found.values.tolist(), found.vectors.T, strict=True):
            v = vector.to(self._op.device, self.dtype)
            v = v / torch.linalg.vector_norm(v)
            lengths.append(float(torch.linalg.vector_norm(self._op @ v - value * v)))
        return torch.tensor(lengths, dtype=torch.float64)


def _reaching(check: _Check, name: str, solve: Solver, k: int, tol: float) -> Found:
    """The first run of a rival whose residuals are as small as ours are asked to be.

    Its own tolerance means something else: it is lowered until they are. Only the run that reaches
    it counts.
    """
    for power in range(7):
        found = solve(k, tol / 10**power)
        if check.residuals(found).max() <= RESIDUAL * found.values.abs().max():
            return found
    raise UserError(
        f"{name} does not reach a residual of {RESIDUAL} for {k} eigenvalues: leave it out with "
        "--rival, or train for more --steps"
    )


def _timed(device: torch.device, solve: Callable[[], Any]) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    found = solve()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - start


def _steppe(task: Task, k: int, which: Any) -> Found:
    op = HessianOperator(task.model, loss, task.batches)

    def solve() -> Any:
        return top_eigenvalues(op, k, which, tol=RESIDUAL, vectors=True)

    found, seconds = _timed(op.device, solve)
    return Found(found.values, found.vectors, seconds, op.products)


def _eigsh(task: Task, limit: float) -> Solver:
    """ARPACK on curvlinops' Hessian, in the network's own number format.

    That is faster than its default of float64. Its basis is indexed with 32 bits: where the default
    of 2 k + 1 vectors would overflow (and crash the process), it gets as many as it can hold.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, at the import
        from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    device, dtype = task.batches[0][0].device, task.batches[0][0].dtype
    params = [p for p in task.model.parameters() if p.requires_grad]
    numpy_dtype = {torch.float32: "float32", torch.float64: "float64"}[dtype]

    def solver(k: int, tol: float) -> Found:
        hessian = HessianLinearOperator(
            task.model, nn.CrossEntropyLoss(), params, task.batches, check_deterministic=False
        ).to_scipy(dtype=numpy_dtype)
        count, n = 0, hessian.shape[0]
        ncv = min(n, max(2 * k + 1, 20), (2**31 - 1) // n)

        def matvec(v: Any) -> Any:
            nonlocal count
            count += 1
            if (spent := time.perf_counter() - start) > limit:
                raise _TooSlowError(spent, count)
            return hessian.matvec(v)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit, at the first product
            hessian.matvec(np.zeros(n, dtype=hessian.dtype))  # which is not timed, as ours is not
        start = time.perf_counter()
        counted = LinearOperator(hessian.shape, matvec=matvec, dtype=hessian.dtype)
        (values, vectors), seconds = _timed(
            device, lambda: eigsh(counted, k=k, ncv=ncv, which="LA", tol=tol)
        )
        return Found(torch.from_numpy(values), torch.from_numpy(vectors), seconds, count)

    return solver


def _pyhessian(task: Task) -> Solver:
    """One batch is handed over as such: its gradient is then kept between products."""
    from pyhessian import hessian

    device = task.batches[0][0].device
    data = {"data": task.batches[0]} if len(task.batches) == 1 else {"dataloader": task.batches}

    def solver(k: int, tol: float) -> Found:
        def solve() -> Any:
            tool = hessian(task.model, nn.CrossEntropyLoss(), cuda=device.type == "cuda", **data)
            return tool.eigenvalues(maxIter=1000, tol=tol, top_n=k)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backward(create_graph=True)
            (values, vectors), seconds = _timed(device, solve)
        for p in task.model.parameters():
            p.grad = None  # it holds a graph
        columns = [torch.cat([part.detach().flatten() for part in v]) for v in vectors]
        return Found(torch.tensor(values), torch.stack(columns, dim=1), seconds, None)

    return solver


_EXACTNESS = ("worst residual over lambda_max", "lambda_max", "smallest")


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    about = f"{result['backbone']} ({result['parameters']:,} parameters), {result['images']} images"
    headings = ("solver", "top", "seconds", "products", "residual / λmax", "λmax", "smallest")
    table = Table(*headings, title=f"Eigenvalues of the Hessian, {about}")
    for row in result["solvers"]:
        table.add_row(
            row["solver"],
            str(row["eigenvalues"]),
            f"{'> ' if 'stopped' in row else ''}{row['seconds']['median']:.2f}",
            str(row["products"] or ""),
            *(f"{row[key]:.3g}" if key in row else "" for key in _EXACTNESS),
        )
    if not result["ratios"]:
        return [table]
    ratios = Table("time", "median", "min", "max", title="Ratios, round by round")
    for name, ratio in result["ratios"].items():
        below = "< " if "upper bound" in ratio else ""
        ratios.add_row(name, *(f"{below}{ratio[key]:.3f}" for key in ("median", "min", "max")))
    return [table, ratios]
