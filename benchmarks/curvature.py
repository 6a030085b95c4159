"""Time to the top Hessian eigenvalues, compared with eigsh and PyHessian at the same residual."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import Result, command, option, ratio, seconds, spread, take_turns
from images import image_folder
from task import SMALL, Task, TaskOptions, prepare
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.curvature import HessianOperator, top_eigenvalues
from steppe.errors import UserError, unknown

RESIDUAL = 1e-3  # required of every solver, relative to the largest eigenvalue
RIVALS = {"eigsh": "steppe", "pyhessian": "steppe, by magnitude"}  # and the steppe solver to match
OURS = {"fp32": "steppe", "tf32": "steppe, tf32"}
RESIDUALS = "worst residual over lambda_max"
EXACT = 1_000_000  # check residuals in float64 up to this many parameters
FEW = 10  # eigenvalues for power iteration, which is too slow for more


@dataclass(frozen=True, kw_only=True)
class Options(TaskOptions):
    batch: int = option(64, "Images per batch.", min=1)
    batches: int = option(1, "Batches to average the loss over.", min=1)
    top: int = option(50, "Number of eigenvalues.", min=1)
    rounds: int = option(3, "Rounds of all solvers.", min=1)
    precision: list[str] | None = option(None, "fp32 or tf32 (default: fp32; on a GPU, both).")
    rival: list[str] | None = option(None, "eigsh, pyhessian, or none (default: both).")
    limit: float = option(math.inf, "Stop eigsh after this many seconds and report a lower bound.")


class Found(NamedTuple):
    values: Tensor
    vectors: Tensor  # in columns
    seconds: float
    products: int | None


Solver = Callable[[int, float], Found]  # of a number of eigenpairs and the solver's own tolerance


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measure(options: Options) -> Result:
    rivals = tuple(RIVALS) if options.rival is None else tuple(options.rival)
    for rival in rivals:
        if rival not in (*RIVALS, "none"):
            raise UserError(unknown("rival", rival, RIVALS))
    for precision in options.precision or ():
        if precision not in OURS:
            raise UserError(unknown("precision", precision, OURS))
    if not options.limit > 0:
        raise UserError(f"--limit {options.limit:g}: expected a positive number of seconds")
    if options.backbone == SMALL:
        return solve(prepare(options), options, rivals)
    with image_folder() as images:
        return solve(prepare(options, images), options, rivals)


def solve(task: Task, options: Options, rivals: Sequence[str]) -> Result:
    n = sum(p.numel() for p in task.model.parameters())
    top, few = options.top, min(FEW, options.top)
    check = checker(task, exact=n <= EXACT)
    precisions = options.precision or (OURS if task.device.type == "cuda" else ["fp32"])
    solvers: dict[str, tuple[int, Callable[[], Found]]] = {}
    for precision in precisions:
        # An untimed first run does all imports and algorithm selection.
        steppe(task, 1, "LA", precision)
        solvers[OURS[precision]] = top, partial(steppe, task, top, "LA", precision)
    if "eigsh" in rivals:
        # Its tolerance is relative to each eigenvalue; this gives `RESIDUAL` for the smallest.
        values = steppe(task, top, "LA").values.tolist()
        tol = min(RESIDUAL * max(values) / abs(min(values)), 0.1)
        arpack = eigsh(task, options.limit)
        solvers["eigsh"] = top, partial(reaching, check, "eigsh", arpack, top, tol)
    if "pyhessian" in rivals:
        solvers[RIVALS["pyhessian"]] = few, partial(steppe, task, few, "LM")
        power = pyhessian(task)
        solvers["pyhessian"] = few, partial(reaching, check, "PyHessian", power, few, RESIDUAL)
    turns = {name: partial(_row, run, check, task.device) for name, (_, run) in solvers.items()}
    rows = take_turns(turns, options.rounds, "solving")
    compared = [(ours, rival) for rival, ours in RIVALS.items()]
    compared += [(OURS["tf32"], "eigsh"), (OURS["tf32"], OURS["fp32"])]
    ratios = {
        f"{ours}, top {solvers[rival][0]}, over {rival}": found
        for ours, rival in compared
        if {ours, rival} <= rows.keys() and (found := _ratio(rows[ours], rows[rival]))
    }
    return {
        **task.about,
        "images": sum(len(y) for _, y in task.batches),
        "batches": len(task.batches),
        "parameters": n,
        "residuals checked in": str(check.dtype).removeprefix("torch."),
        "solvers": [
            {"solver": name, "eigenvalues": k, **_summary(rows[name])}
            for name, (k, _) in solvers.items()
        ],
        "ratios": ratios,
    }


def _row(run: Callable[[], Found], check: HessianOperator, device: torch.device) -> Result:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        found = run()
    except TimeoutError as stopped:
        spent, products = stopped.args
        return {"seconds": spent, "products": products, "stopped": True}
    peak: Result = {}
    if device.type == "cuda":  # before the residuals, which allocate memory too
        peak["peak GiB"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return {
        "seconds": found.seconds,
        "products": found.products,
        RESIDUALS: float(f"{worst(check, found):.2e}"),
        "lambda_max": float(f"{found.values.max():.8g}"),
        "smallest": float(f"{found.values.min():.8g}"),
        **peak,
    }


def _summary(rows: Sequence[Result]) -> Result:
    summary = rows[0] | {"seconds": spread([row["seconds"] for row in rows])}
    if any("stopped" in row for row in rows):  # the seconds are a lower bound
        return {name: summary[name] for name in ("seconds", "products")} | {"stopped": True}
    return summary | {RESIDUALS: max(row[RESIDUALS] for row in rows)}


def _ratio(ours: Sequence[Result], theirs: Sequence[Result]) -> Result | None:
    """Return our time over theirs; None if they were stopped before we finished."""
    found: Result = ratio([row["seconds"] for row in ours], [row["seconds"] for row in theirs])
    if any("stopped" in row for row in theirs):
        return {**found, "upper bound": True} if found["max"] <= 1 else None
    return found


def checker(task: Task, exact: bool) -> HessianOperator:
    model, batches = task.model, task.batches
    if exact:
        model = copy.deepcopy(model).double()
        batches = [(x.double(), y) for x, y in batches]
    # Kept graphs would count toward a solver's peak memory.
    return HessianOperator(model, loss, batches, keep_graphs=False)


def worst(check: HessianOperator, found: Found) -> float:
    """Return the largest residual norm of unit eigenvectors, relative to the top eigenvalue."""
    norms: list[float] = []
    # Ten at a time share the forward and the first backward pass.
    for values, vectors in zip(found.values.split(10), found.vectors.split(10, dim=1), strict=True):
        v = vectors.to(check.device, check.dtype)
        v = v / torch.linalg.vector_norm(v, dim=0)
        left = check @ v - v * values.to(v)
        norms += torch.linalg.vector_norm(left, dim=0).tolist()
    return max(norms) / float(found.values.abs().max())


def reaching(check: HessianOperator, name: str, solver: Solver, k: int, tol: float) -> Found:
    """Lower a solver's own tolerance until its residuals are below `RESIDUAL`."""
    for power in range(7):
        found = solver(k, tol / 10**power)
        if worst(check, found) <= RESIDUAL:
            return found
    raise UserError(
        f"{name} does not reach a residual of {RESIDUAL} for {k} eigenvalues: exclude it with "
        "--rival, or train for more --steps"
    )


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[Any, float]:
    found: list[Any] = []
    took = seconds(device, lambda: found.append(run()))
    return found[0], took


def steppe(task: Task, k: int, which: Any, precision: Any = "fp32") -> Found:
    op = HessianOperator(task.model, loss, task.batches)
    run = partial(top_eigenvalues, op, k, which, tol=RESIDUAL, precision=precision, vectors=True)
    found, took = _timed(op.device, run)
    return Found(found.values, found.vectors, took, op.products)


def eigsh(task: Task, limit: float) -> Solver:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch.jit during import
        from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    params = [p for p in task.model.parameters() if p.requires_grad]
    # The network's dtype, which is faster than the default, float64.
    dtype = str(task.batches[0][0].dtype).removeprefix("torch.")

    def solver(k: int, tol: float) -> Found:
        hessian = HessianLinearOperator(
            task.model, nn.CrossEntropyLoss(), params, task.batches, check_deterministic=False
        ).to_scipy(dtype=dtype)
        count, n = 0, hessian.shape[0]
        # ARPACK indexes its basis with 32 bits, and more vectors would crash the process.
        ncv = min(n, max(2 * k + 1, 20), (2**31 - 1) // n)

        def matvec(v: Any) -> Any:
            nonlocal count
            count += 1
            if (spent := time.perf_counter() - start) > limit:
                raise TimeoutError(spent, count)
            return hessian.matvec(v)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch.jit in the first product
            hessian.matvec(np.zeros(n, dtype=hessian.dtype))  # untimed warm-up, as for steppe
        start = time.perf_counter()
        counted = LinearOperator(hessian.shape, matvec=matvec, dtype=hessian.dtype)
        run = partial(eigsh, counted, k=k, ncv=ncv, which="LA", tol=tol)
        (values, vectors), took = _timed(task.device, run)
        return Found(torch.from_numpy(values), torch.from_numpy(vectors), took, count)

    return solver


def pyhessian(task: Task) -> Solver:
    from pyhessian import hessian

    cuda = task.device.type == "cuda"
    # With a single batch, PyHessian keeps the gradient between products.
    data = {"data": task.batches[0]} if len(task.batches) == 1 else {"dataloader": task.batches}

    def solver(k: int, tol: float) -> Found:
        def run() -> Any:
            tool = hessian(task.model, nn.CrossEntropyLoss(), cuda=cuda, **data)
            return tool.eigenvalues(maxIter=1000, tol=tol, top_n=k)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backward(create_graph=True)
            (values, vectors), took = _timed(task.device, run)
        for p in task.model.parameters():
            p.grad = None  # it holds a graph
        columns = [torch.cat([part.detach().flatten() for part in v]) for v in vectors]
        return Found(torch.tensor(values), torch.stack(columns, dim=1), took, None)

    return solver


main = command(Options, measure)
