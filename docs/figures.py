"""Draws the figures of the docs, with steppe, and keeps the numbers behind them.

    python docs/figures.py              # all: 19 minutes on two busy CPU cores
    python docs/figures.py minima ...   # some
    python docs/figures.py --quick      # small versions in seconds, which prove nothing

Each figure is drawn twice, for the light and the dark palette of the site; what it was drawn from
goes to `numbers.json` beside them. Tables on the pages are held against that file by the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.curvature import (
    HessianOperator,
    flatness,
    lambda_max_from_flatness,
    top_eigenvalues,
    trace,
)
from steppe.domains import load, split_dataset
from steppe.domains.pool import cores, start_worker
from steppe.environment import environment
from steppe.optim import FAD, GAM, SAM, optimizer_spec
from steppe.paper.catalog import DEMO as OPTIMIZERS
from steppe.reports.palette import looks
from steppe.training import load_model, make_config, train

FOLDER = Path(__file__).parent / "figures"
NUMBERS = "numbers.json"

Record = dict[str, Any]
"""What a figure is drawn from, as JSON has it."""


@dataclass(frozen=True)
class Palette:
    """Colours that can be read on the site's background."""

    ink: str
    faint: str
    back: str
    methods: tuple[str, ...]

    def of(self, name: str) -> str:
        """The colour of an optimizer."""
        return self.methods[list(OPTIMIZERS).index(name)]


LOOKS = looks(OPTIMIZERS)
"""As on the report page."""
PALETTES = {
    "light": Palette(
        ink="#333333",
        faint="#dddddd",
        back="#ffffff",
        methods=tuple(look.colour for look in LOOKS.values()),
    ),
    "dark": Palette(
        ink="#d5d7de",
        faint="#454854",
        back="#1e2129",
        methods=tuple(look.dark for look in LOOKS.values()),
    ),
}
LABELS = {name: "Adam" if name == "adam" else name.upper() for name in OPTIMIZERS}


@dataclass(frozen=True)
class Drawing:
    """A figure: how its numbers are computed, how they are drawn, and how large."""

    compute: Callable[[bool], Record]
    draw: Callable[[Axes, Record, Palette], None]
    size: tuple[float, float] = (5.0, 2.9)
    """Inches; small, so that the letters can be read on a phone."""


def _module(start: Sequence[float]) -> nn.Module:
    """A model that is its weights, in float64."""
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    return model


def _gap(t: Tensor, centre: float, curvature: float) -> Tensor:
    return 0.5 * curvature * (t - centre) ** 2


# --- minima: one loss, two minima, both measures ---------------------------------------------

SHARP, FLAT = (-1.6, 40.0), (1.2, 4.0)
"""Place and curvature of each minimum."""
RADIUS = 0.3


def two_minima(t: Tensor) -> Tensor:
    """A smooth minimum of two parabolas, equally deep."""
    parabolas = torch.stack([_gap(t, *SHARP), _gap(t, *FLAT)])
    return -torch.logsumexp(-6 * parabolas, 0) / 6


def _measure_1d(loss: Callable[[Tensor], Tensor], at: float, rho: float) -> Record:
    model = _module([at])

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (loss(model.w) * batch).mean()

    found = flatness(model, loss_fn, [torch.ones(1, dtype=torch.float64)], rho)
    second = HessianOperator(model, loss_fn, [torch.ones(1, dtype=torch.float64)])
    return {
        "at": at,
        "loss": found.loss,
        "zeroth": found.zeroth,
        "first": found.first,
        "curvature": float(second @ torch.ones(1, dtype=torch.float64)),
    }


def _compute_minima(quick: bool) -> Record:
    points = {"sharp": SHARP[0], "flat": FLAT[0]}
    found = {name: _measure_1d(two_minima, at, RADIUS) for name, at in points.items()}
    return {"rho": RADIUS, **found}


def _draw_minima(axes: Axes, record: Record, palette: Palette) -> None:
    t = torch.linspace(-2.2, 2.7, 500, dtype=torch.float64)
    axes.plot(t, two_minima(t), color=palette.ink, linewidth=1.6)
    rho = record["rho"]
    for name, colour, (x, y) in (
        ("sharp", palette.of("sgd"), (-1.1, 1.0)),
        ("flat", palette.of("fad"), (1.2, 1.0)),
    ):
        found = record[name]
        at, low = found["at"], found["loss"]
        axes.axvspan(at - rho, at + rho, color=colour, alpha=0.18, linewidth=0)
        near = torch.linspace(at - rho, at + rho, 100, dtype=torch.float64)
        axes.plot(near, two_minima(near), color=colour, linewidth=3)
        axes.hlines(low + found["zeroth"], at - rho, at + rho, color=colour, linestyle=":")
        text = rf"$R^0$ = {found['zeroth']:.2f}" + "\n" + rf"$R^1$ = {found['first']:.2f}"
        axes.text(x, y, text, color=colour, ha="left" if name == "sharp" else "center")
    axes.set_ylim(-0.25, 3.2)
    axes.set_xlabel("weight")
    axes.set_ylabel("loss")


# --- ripple: equal zeroth-order flatness, unequal first-order flatness -----------------------

RIPPLE, WAVES = 0.04, 4.4
"""Height, and number within the radius."""
LIFT = RIPPLE * (1 - math.cos(2 * math.pi * WAVES))
"""What the ripples add at the end of the ball, and the parabola below them gives up."""


def smooth(t: Tensor) -> Tensor:
    """A parabola."""
    return 0.5 * t**2


def rippled(t: Tensor) -> Tensor:
    """The same with ripples, and as high at the end of the ball."""
    return (1 - 2 * LIFT) * smooth(t) + RIPPLE * (1 - torch.cos(2 * math.pi * WAVES * t))


def _compute_ripple(quick: bool) -> Record:
    found = {f.__name__: _measure_1d(f, 0.0, 1.0) for f in (smooth, rippled)}
    return {"rho": 1.0, **found}


def _draw_ripple(axes: Axes, record: Record, palette: Palette) -> None:
    t = torch.linspace(-1.25, 1.25, 800, dtype=torch.float64)
    axes.axvspan(-1, 1, color=palette.faint, alpha=0.5, linewidth=0)
    for f, name, style in ((smooth, "fad", "-"), (rippled, "sgd", "-")):
        found = record[f.__name__]
        label = rf"$R^0$ = {found['zeroth']:.2f},  $R^1$ = {found['first']:.2f}"
        axes.plot(t, f(t), style, color=palette.of(name), linewidth=2, label=label)
    axes.set_ylim(-0.03, 1.02)
    axes.legend(loc="upper center", frameon=False, labelcolor=palette.ink)
    axes.set_xlabel(r"weight (shaded: within $\rho$ = 1)")
    axes.set_ylabel("loss")


# --- points: where a step of FAD looks -------------------------------------------------------

START = (-0.9, 0.22)


def bowl(w: Tensor) -> Tensor:
    """A valley that bends a little."""
    x, y = w[0], w[1]
    return 0.5 * x**2 + 3.0 * (y - 0.1 * x**2) ** 2


def _compute_points(quick: bool) -> Record:
    model = _module(START)
    opt = FAD(torch.optim.SGD([model.w], lr=1.0), rho=0.35, alpha=0.5, beta=0.5)
    points, gradients = [], []
    for phase in opt.phases():
        with phase:
            bowl(model.w).backward()
            points.append(model.w.tolist())
            gradients.append(model.w.grad.tolist())
    return {
        "rho": 0.35,
        "points": points,
        "gradients": gradients,
        "step": model.w.grad.tolist(),
    }


def _draw_points(axes: Axes, record: Record, palette: Palette) -> None:
    _contours(axes, bowl, (-1.6, 0.25), (-0.3, 0.95), palette)
    points = record["points"]
    places = ((9, -3), (-20, 2), (9, -2), (-7, 8))
    names = (r"$\theta$", r"$\theta_1$", r"$\theta_2$", r"$\theta_3$")
    for i, (start, end) in enumerate(((0, 1), (0, 2), (2, 3))):
        axes.annotate(
            "",
            points[end],
            points[start],
            arrowprops={"arrowstyle": "->", "color": palette.methods[(2, 3, 4)[i]], "linewidth": 2},
        )
    for point, name, offset in zip(points, names, places, strict=True):
        axes.plot(*point, "o", color=palette.ink, markersize=5)
        axes.annotate(
            name, point, xytext=offset, textcoords="offset points", color=palette.ink, fontsize=12
        )
    down = record["step"]
    length = sum(d * d for d in down) ** 0.5
    end = [p - 0.4 * d / length for p, d in zip(points[0], down, strict=True)]
    style = {"arrowstyle": "-|>", "color": palette.of("sgd"), "linewidth": 2.4}
    axes.annotate("", end, points[0], arrowprops=style)
    axes.annotate("the step", end, (4, -12), textcoords="offset points", color=palette.of("sgd"))
    axes.set_aspect("equal")


# --- drift: along a valley that widens ---------------------------------------------------------

PATH_STEPS = 300
PATH_RHO = 0.3
PATHS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "sgd": lambda base: base,
    "sam": lambda base: SAM(base, rho=PATH_RHO),
    "gam": lambda base: GAM(base, rho=PATH_RHO, alpha=1.0),
    "fad": lambda base: FAD(base, rho=PATH_RHO, alpha=0.5, beta=1.0),
}


def across(x: Tensor) -> Tensor:
    """The curvature across the valley: large on the left, small on the right."""
    return 0.5 + 8.0 * torch.sigmoid(-2.0 * x)


def valley(w: Tensor) -> Tensor:
    """A valley whose floor is equally deep everywhere."""
    return 0.5 * across(w[0]) * w[1] ** 2


def _compute_drift(quick: bool) -> Record:
    paths: dict[str, Any] = {}
    for name, make in PATHS.items():
        model = _module((-1.5, 0.55))
        opt = make(torch.optim.SGD([model.w], lr=0.05))
        path = [model.w.tolist()]

        def closure(model: nn.Module = model, opt: torch.optim.Optimizer = opt) -> Tensor:
            opt.zero_grad()
            loss = valley(model.w)
            loss.backward()
            return loss.detach()

        for _ in range(20 if quick else PATH_STEPS):
            opt.step(closure)
            path.append(model.w.tolist())
        paths[name] = {
            "end": path[-1],
            "loss": float(valley(torch.tensor(path[-1], dtype=torch.float64))),
            "curvature": across(torch.tensor(path, dtype=torch.float64)[:, 0]).tolist(),
        }
    return {"rho": PATH_RHO, "steps": PATH_STEPS, "paths": paths}


def _draw_drift(axes: Axes, record: Record, palette: Palette) -> None:
    for name, run in record["paths"].items():
        curve = run["curvature"]
        colour = palette.of(name)
        axes.plot(range(len(curve)), curve, color=colour, linewidth=2.2, label=LABELS[name])
    axes.set_ylim(0, 9)
    axes.set_xlabel("step")
    axes.set_ylabel("curvature across the valley")
    axes.legend(frameon=False, labelcolor=palette.ink)


def _contours(
    axes: Axes,
    loss: Callable[[Tensor], Tensor],
    wide: tuple[float, float],
    high: tuple[float, float],
    palette: Palette,
) -> None:
    x, y = (torch.linspace(*ends, 60, dtype=torch.float64) for ends in (wide, high))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"))
    axes.contour(x, y, loss(grid), levels=12, colors=palette.ink, linewidths=0.7, alpha=0.4)
    axes.set_xlabel("first weight")
    axes.set_ylabel("second weight")


# --- runs on RotatedDigits, for what follows -------------------------------------------------

TARGET = "75"
SEEDS = 5
STEPS = 601
TOP = 20
IMAGES = 500
REACH = 0.5
"""How far along the leading eigenvector the loss is looked at, to each side."""
RHO = 0.1
"""Of the flatness that all runs are measured with."""


@dataclass(frozen=True)
class Job:
    """A run and what is measured of it."""

    optimizer: str
    options: dict[str, float]
    seed: int
    steps: int
    radii: tuple[float, ...] = (RHO,)
    top: int = TOP
    images: int = IMAGES
    rtol: float = 0.05
    """Of the trace."""
    climbs: int = 40
    """Steps of an ascent, for flatness."""


QUICK = {"steps": 6, "top": 1, "images": 20, "rtol": 0.5, "climbs": 2}


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _training_images(number: int, trial_seed: int) -> tuple[Tensor, Tensor]:
    """Images that a run learned from, as many of each of its domains."""
    splits = split_dataset(load("RotatedDigits"), [TARGET], trial_seed)
    sources = [split for split in splits if split.source]
    images, labels = [], []
    for split in sources:
        chosen = split.parts["train"][: number // len(sources)]
        images += [torch.as_tensor(split.domain.images[int(i)]) for i in chosen]
        labels += [int(split.domain.labels[i]) for i in chosen]
    return torch.stack(images).permute(0, 3, 1, 2), torch.tensor(labels)


def _run(job: Job) -> Record:
    """Trains and measures; the last weights count."""
    values = {
        "dataset": "RotatedDigits",
        "targets": TARGET,
        "optimizer": {"name": job.optimizer, **job.options},
        "seed": job.seed,
        "trial_seed": job.seed,
        "steps": job.steps,
        "batch_size": 16,
        "checkpoint_every": max(1, job.steps - 1),
        "device": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        last = train(make_config(values), folder)[-1]
        model = load_model(folder, "last").double()
    images, labels = _training_images(job.images, job.seed)
    batches = [(model.algorithm.network.normalize(images).double(), labels)]
    hessian = HessianOperator(model, _cross_entropy, batches)
    found = top_eigenvalues(hessian, k=job.top, vectors=True)
    loss, gradient = hessian.gradient()
    balls = [
        flatness(model, _cross_entropy, batches, rho, restarts=2, steps=job.climbs, tol=1e-3)
        for rho in job.radii
    ]
    return {
        "optimizer": job.optimizer,
        "options": job.options,
        "seed": job.seed,
        "accuracy": round(100 * last["domains"][TARGET]["test"]["accuracy"], 2),
        "loss": loss,
        "gradient norm": float(gradient.norm()),
        "eigenvalues": [round(v, 5) for v in found.values.tolist()],
        "trace": trace(hessian, rtol=job.rtol, eigenvalues=found).value,
        "flatness": [{"rho": b.rho, "zeroth": b.zeroth, "first": b.first} for b in balls],
        "profile": _profile(model, batches[0], found.vectors[:, 0]),
    }


def _profile(model: nn.Module, batch: Any, direction: Tensor) -> list[list[float]]:
    """The loss at some distances along a direction, from the weights."""
    home = nn.utils.parameters_to_vector(model.parameters()).detach()
    curve = []
    with torch.no_grad():
        for t in torch.linspace(-REACH, REACH, 41, dtype=torch.float64).tolist():
            nn.utils.vector_to_parameters(home + t * direction, model.parameters())
            curve.append([round(t, 4), round(float(_cross_entropy(model, batch)), 6)])
    return curve


def _runs(jobs: Sequence[Job], quick: bool) -> list[Record]:
    if quick:
        return [_run(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores(), context, initializer=_start) as pool:
        return list(pool.map(_run, jobs))


def _start() -> None:
    """Prepares a process for runs: one thread, since there is one process for each core."""
    start_worker()
    torch.set_num_threads(1)
    logging.getLogger("steppe").setLevel(logging.ERROR)


def _mean_error(values: Sequence[float]) -> list[float]:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [statistics.mean(values), error]


# --- valley and outcome: the minima of five optimizers ---------------------------------------


def _compute_valley(quick: bool) -> Record:
    names = ("sgd", "fad") if quick else tuple(OPTIMIZERS)
    scale, seeds = (QUICK, 1) if quick else ({"steps": STEPS}, SEEDS)
    jobs = [Job(name, OPTIMIZERS[name], seed, **scale) for name in names for seed in range(seeds)]
    runs = _runs(jobs, quick)
    return {
        "dataset": "RotatedDigits",
        "target": TARGET,
        "steps": scale["steps"],
        "rho": RHO,
        "seeds": seeds,
        "summary": {name: _summary(name, runs) for name in names},
        "rank correlation": _rank_correlation(runs),
        "runs": runs,
    }


def _summary(name: str, runs: Sequence[Record]) -> Record:
    """Means over seeds, with their standard errors."""
    own = [run for run in runs if run["optimizer"] == name]
    return {
        "accuracy": _mean_error([run["accuracy"] for run in own]),
        "lambda_max": _mean_error([run["eigenvalues"][0] for run in own]),
        "trace": _mean_error([run["trace"] for run in own]),
        "zeroth": _mean_error([run["flatness"][0]["zeroth"] for run in own]),
        "first": _mean_error([run["flatness"][0]["first"] for run in own]),
        "loss": _mean_error([run["loss"] for run in own]),
        "passes": optimizer_spec(name).passes,
    }


def _rank_correlation(runs: Sequence[Record]) -> float | None:
    """Spearman's, of sharpness and accuracy over all runs."""
    columns = [[run["eigenvalues"][0] for run in runs], [run["accuracy"] for run in runs]]
    if any(len(set(column)) == 1 for column in columns):
        return None  # of a constant there is none
    return statistics.correlation(*(rankdata(column).tolist() for column in columns))


def _draw_valley(axes: Axes, record: Record, palette: Palette) -> None:
    shown = [name for name in ("adam", "sgd", "sam", "fad") if name in record["summary"]]
    for name in shown:
        own = [run["profile"] for run in record["runs"] if run["optimizer"] == name]
        curves = [_steep_side_right(curve) for curve in own]
        colour = palette.of(name)
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.35)
        mean = [
            (points[0][0], statistics.mean(loss for _, loss in points))
            for points in zip(*curves, strict=True)
        ]
        axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2.6, label=LABELS[name])
    axes.set_ylim(0, 4)
    axes.set_xlim(-0.3, 0.3)
    axes.legend(loc="upper center", frameon=False, labelcolor=palette.ink)
    axes.set_xlabel("distance along the steepest direction")
    axes.set_ylabel("training loss")


def _steep_side_right(curve: list[list[float]]) -> list[list[float]]:
    """An eigenvector has no sign: the side where the loss rises further is drawn on the right."""
    if curve[0][1] <= curve[-1][1]:
        return curve
    return [[-t, loss] for t, loss in reversed(curve)]


def _draw_outcome(axes: Axes, record: Record, palette: Palette) -> None:
    for name in record["summary"]:
        own = [run for run in record["runs"] if run["optimizer"] == name]
        x, y = [run["eigenvalues"][0] for run in own], [run["accuracy"] for run in own]
        colour = palette.of(name)
        axes.plot(
            x, y, LOOKS[name].marker, color=colour, markersize=7, label=LABELS[name], alpha=0.85
        )
    _plain_log(axes, "x")
    axes.set_xlabel(r"$\lambda_{\max}$ on the training domains (sharper to the right)")
    axes.set_ylabel("accuracy at 75°, %")
    legend = {"frameon": False, "labelcolor": palette.ink, "columnspacing": 1.0}
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, handletextpad=0.1, **legend)


def _plain_log(axes: Axes, which: str) -> None:
    """A logarithmic axis whose ticks are written out."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# --- radius: Eq. 4 against the eigenvalue itself ---------------------------------------------

RADII = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def _compute_radius(quick: bool) -> Record:
    scale, radii = (QUICK, RADII[-2:]) if quick else ({"steps": 2 * STEPS}, RADII)
    names = ("sgd", "fad")
    jobs = [Job(name, OPTIMIZERS[name], 0, radii=radii, **scale) for name in names]
    found = dict(zip(names, _runs(jobs, quick), strict=True))
    for run in found.values():
        for ball in run["flatness"]:
            for order, alpha in (("zeroth", 1.0), ("first", 0.0)):
                implied = lambda_max_from_flatness(ball[order], ball["rho"], alpha)
                ball[f"implied by {order}"] = implied
        del run["profile"]
    return {"steps": scale["steps"], "runs": found}


def _draw_radius(axes: Axes, record: Record, palette: Palette) -> None:
    for name, run in record["runs"].items():
        colour, balls = palette.of(name), run["flatness"]
        radii = [ball["rho"] for ball in balls]
        axes.axhline(run["eigenvalues"][0], color=colour, linewidth=1.2)
        for order, style in (("zeroth", "--"), ("first", ":")):
            label = rf"{LABELS[name]}, by $R^{'0' if order == 'zeroth' else '1'}$"
            implied = [ball[f"implied by {order}"] for ball in balls]
            axes.plot(radii, implied, style, color=colour, marker="o", markersize=4, label=label)
    _plain_log(axes, "x")
    _plain_log(axes, "y")
    axes.set_xlabel(r"radius $\rho$ (lines across: $\lambda_{\max}$ itself)")
    axes.set_ylabel(r"$\lambda_{\max}$ by Eq. 4")
    axes.legend(frameon=False, labelcolor=palette.ink, fontsize=9, loc="best")


# --- mix: what alpha and beta do -------------------------------------------------------------

ALPHAS, BETAS = (0.0, 0.5, 1.0), (0.25, 0.5, 1.0)


def _compute_mix(quick: bool) -> Record:
    alphas, betas, seeds = ((0.5,), (1.0,), 1) if quick else (ALPHAS, BETAS, 3)
    scale = QUICK if quick else {"steps": STEPS, "top": 10}
    cells = [(0.0, 0.0), *((alpha, beta) for alpha in alphas for beta in betas)]
    fixed = {k: OPTIMIZERS["fad"][k] for k in ("lr", "rho")}
    jobs = [
        Job("fad", {**fixed, "alpha": alpha, "beta": beta}, seed, radii=(), **scale)
        for alpha, beta in cells
        for seed in range(seeds)
    ]
    runs = iter(_runs(jobs, quick))
    table = []
    for alpha, beta in cells:
        own = [next(runs) for _ in range(seeds)]
        table.append(
            {
                "alpha": alpha,
                "beta": beta,
                "lambda_max": _mean_error([run["eigenvalues"][0] for run in own]),
                "trace": _mean_error([run["trace"] for run in own]),
                "accuracy": _mean_error([run["accuracy"] for run in own]),
                "loss": _mean_error([run["loss"] for run in own]),
            }
        )
    return {"rho": fixed["rho"], "steps": scale["steps"], "seeds": seeds, "cells": table}


def _draw_mix(axes: Axes, record: Record, palette: Palette) -> None:
    plain, *cells = record["cells"]
    chosen = (palette.of("gam"), palette.of("fad"), palette.of("sam"))
    for alpha, colour, style in zip(ALPHAS, chosen, (":", "-", "--"), strict=True):
        own = [plain, *(cell for cell in cells if cell["alpha"] == alpha)]
        if len(own) == 1:
            continue
        y, errors = zip(*(cell["trace"] for cell in own), strict=True)
        axes.errorbar(
            [cell["beta"] for cell in own],
            y,
            yerr=errors,
            color=colour,
            linestyle=style,
            marker="o",
            capsize=3,
            linewidth=2,
            label=rf"$\alpha$ = {alpha:g}",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(r"$\beta$, the weight of flatness")
    axes.set_ylabel("trace of the Hessian")
    axes.legend(frameon=False, labelcolor=palette.ink)


DRAWINGS = {
    "valley": Drawing(_compute_valley, _draw_valley),
    "minima": Drawing(_compute_minima, _draw_minima),
    "ripple": Drawing(_compute_ripple, _draw_ripple),
    "points": Drawing(_compute_points, _draw_points, (5.0, 3.4)),
    "drift": Drawing(_compute_drift, _draw_drift),
    "radius": Drawing(_compute_radius, _draw_radius),
    "mix": Drawing(_compute_mix, _draw_mix),
}
SAME_NUMBERS = {"outcome": ("valley", Drawing(_compute_valley, _draw_outcome, (5.0, 3.1)))}
"""Figures that are drawn from the numbers of another."""


def figure_names() -> list[str]:
    """Of all figures."""
    return [*DRAWINGS, *SAME_NUMBERS]


def file_name(figure: str, palette: str) -> str:
    """Of a figure's picture."""
    return f"{figure}-{palette}.svg"


def make(names: Sequence[str], out: Path, quick: bool = False) -> None:
    """Compute and draw some figures; the numbers of the others stay as they are."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / NUMBERS
    numbers = json.loads(file.read_text()) if file.exists() else {"figures": {}}
    for name in names:
        source, drawing = SAME_NUMBERS.get(name, (name, DRAWINGS.get(name)))
        if name == source or source not in numbers["figures"]:
            numbers["figures"][source] = _short(drawing.compute(quick))
        save(drawing, name, numbers["figures"][source], out)
        numbers["environment"] = environment(torch.device("cpu")) | {"command": "make figures"}
        file.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
        print(f"{name}: drawn", flush=True)


def save(drawing: Drawing, name: str, record: Record, out: Path) -> None:
    """Draw a figure for both palettes."""
    for kind, palette in PALETTES.items():
        settings: dict[Any, Any] = {
            # Text stays text, and nothing in a file differs from one time to the next.
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.family": "sans-serif",
            "font.size": 10,
            "text.color": palette.ink,
            "axes.edgecolor": palette.ink,
            "axes.labelcolor": palette.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": palette.ink,
            "ytick.color": palette.ink,
        }
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=drawing.size, layout="constrained")
            drawing.draw(figure.subplots(), record, palette)
            path = out / file_name(name, kind)
            figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _short(value: Any) -> Any:
    """Numbers to seven digits, which is what a file needs of them."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the figures of the docs.")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(figure_names())}")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--quick", action="store_true", help="small versions; needs --out")
    given = parser.parse_args()
    if given.quick and given.out == FOLDER:
        parser.error("--quick needs --out: what it draws is not for the pages")
    unknown = set(given.names) - set(figure_names())
    if unknown:
        parser.error(f"no figure {', '.join(sorted(unknown))}; known: {', '.join(figure_names())}")
    make(given.names or figure_names(), given.out, given.quick)


if __name__ == "__main__":
    main()
