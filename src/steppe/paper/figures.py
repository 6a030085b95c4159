"""Figures of the experiments, each drawn from its results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from steppe.reports import Row, Run
from steppe.reports.palette import DASHES, Look, looks
from steppe.reports.selection import best_step
from steppe.reports.spectra import line_style
from steppe.reports.tables import ALL

from .results import AVERAGE, Line, Results, TrainingCost, lines, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER: dict[str, Any] = {"marker": "_", "color": "black", "linestyle": "none", "markersize": 12}
"""Style of the paper's numbers."""
ACCURACY = "accuracy (%)"


class Point(NamedTuple):
    """A method's mean over targets, its error over trials, and the paper's mean."""

    line: Line
    value: float
    error: float
    paper: float | None
    look: Look

    @property
    def spent(self) -> TrainingCost:
        assert self.line.spent is not None
        return self.line.spent


def _figure(columns: int, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.6, 3.6 * columns), height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _bare(axes: Axes, title: str, x: str, y: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False, fontsize=8)


def _looks(results: Results) -> dict[str, Look]:
    """Looks of the methods, the same in all figures of an experiment."""
    rows = (row for _, selected in results.variants for row in selected.rows())
    return looks(row.name for row in rows)


def _averages(results: Results) -> dict[str, list[Point]]:
    """Every method's mean over targets, by dataset."""
    found: dict[str, list[Point]] = defaultdict(list)
    known = _looks(results)
    for line in lines(results):
        ours, paper = line.cells[AVERAGE]
        if line.dataset != ALL and ours is not None:
            look = known[line.method.name]
            found[line.dataset].append(
                Point(line, ours.mean, ours.err, paper and paper.value, look)
            )
    return found


def _by_dataset(results: Results, x: str) -> tuple[Figure, list[tuple[Axes, str, list[Point]]]]:
    """One panel per dataset, with its points."""
    averages = _averages(results)
    figure, panels = _figure(len(averages))
    for axes, dataset in zip(panels, averages, strict=True):
        _bare(axes, short(dataset), x, ACCURACY)
    return figure, [(axes, *own) for axes, own in zip(panels, averages.items(), strict=True)]


def _mark(
    axes: Axes, x: float, point: Point, name: str = "", place: tuple[float, float] = (5, 4)
) -> None:
    axes.errorbar(x, point.value, yerr=point.error, capsize=3, **point.look.marks)
    axes.annotate(name, (x, point.value), xytext=place, textcoords="offset points", fontsize=8)


def methods(results: Results) -> Figure:
    """Accuracy of every method, one panel per dataset, with a dash for the paper's value."""
    figure, panels = _by_dataset(results, "")
    for axes, _, points in panels:
        for x, point in enumerate(points):
            _mark(axes, x, point)
            if point.paper is not None:
                axes.plot([x], [point.paper], **_PAPER)
        names = [point.line.method.name for point in points]
        axes.set_xticks(range(len(points)), names, rotation=60, ha="right")
        axes.margins(0.08, 0.15)
    if any(point.paper for _, _, points in panels for point in points):
        panels[0][0].plot([], [], **_PAPER, label="paper")
        _legend(figure, panels[0][0])
    return figure


def ratio(results: Results) -> Figure:
    """Accuracy against training time, with a line through FAD's ratios."""
    figure, panels = _by_dataset(results, "seconds of training")
    for axes, _, points in panels:
        joined: list[Point] = []
        for point in points:
            value = point.line.arm.value
            name = point.line.method.name if value is None else f"{value:.0%}"
            # The first ratios are close together, so names alternate above and below.
            _mark(axes, point.spent.seconds, point, name, (4, -11 if len(joined) % 2 else 4))
            joined += [] if value is None else [point]
        if joined:
            x, y = [point.spent.seconds for point in joined], [point.value for point in joined]
            axes.plot(x, y, color=joined[0].look.colour, label="FAD")
            axes.legend(frameon=False, fontsize=8)
    return figure


def iterations(results: Results) -> Figure:
    """Accuracy against the number of updates, one line per method; dotted: the paper's."""
    figure, panels = _by_dataset(results, "updates")
    for axes, dataset, points in panels:
        by_method: dict[Row, list[Point]] = defaultdict(list)
        for point in points:
            by_method[point.line.method].append(point)
        for method, own in by_method.items():
            x = [results.order.steps(point.line.arm, dataset) - 1 for point in own]
            y, look = [point.value for point in own], own[0].look
            axes.plot(x, y, label=method.name, **look.marks)
            known = [(point.line.arm.steps, point.paper) for point in own if point.paper]
            if known and results.order.scale.share == 1:
                axes.plot(*zip(*known, strict=True), color=look.colour, linestyle=":", linewidth=1)
    _legend(figure, panels[-1][0])
    return figure


def convergence(results: Results) -> Figure:
    """Training loss against updates and against seconds, averaged over runs."""
    figure, (by_step, by_time) = _figure(2)
    known = _looks(results)
    for _, selected in results.variants:
        for row in selected.rows():
            runs = [chosen.run for place, chosen in selected.chosen.items() if place.row == row]
            steps, seconds, losses = _curve(runs)
            look = line_style(known[row.name])
            by_step.plot(steps, losses, label=row.name, **look)
            by_time.plot(seconds, losses, **look)
    for axes, x in ((by_step, "updates"), (by_time, "seconds of training")):
        axes.set_yscale("log")
        _bare(axes, "", x, "training loss")
    _legend(figure, by_step)
    return figure


def _curve(runs: Sequence[Run]) -> tuple[list[int], list[float], list[float]]:
    """Updates, seconds and training loss: means over runs, at the steps that all runs have."""
    curves: list[dict[int, tuple[float, float]]] = []
    for run in runs:
        curve, seconds, before = {}, 0.0, 0
        for record in run.records:
            seconds += (record.seconds_per_step or 0.0) * (record.step - before)
            before = record.step
            loss = record.loss.get("total", record.loss.get("loss"))
            if loss is not None:
                curve[record.step] = (seconds, loss)
        curves.append(curve)
    steps = sorted(set.intersection(*map(set, curves)))
    means = [[statistics.fmean(c[step][i] for c in curves) for step in steps] for i in (0, 1)]
    return steps, means[0], means[1]


def ablation(results: Results) -> Figure:
    """One panel per hyperparameter of FAD, with SGD and Adam as lines."""
    points = [point for own in _averages(results).values() for point in own]
    names = dict.fromkeys(arm.label.split()[0] for arm in results.order.arms if arm.label)
    figure, panels = _figure(len(names))
    fad = looks(["fad"])["fad"]
    for axes, name in zip(panels, names, strict=True):
        own = [point for point in points if point.line.arm.label.startswith(f"{name} ")]
        x = list(range(len(own)))
        y, errors = [point.value for point in own], [point.error for point in own]
        axes.errorbar(x, y, yerr=errors, label="fad", capsize=2, **fad.marks)
        axes.set_xticks(x, [f"{point.line.arm.value:g}" for point in own], fontsize=8)
        rivals = [point for point in points if not point.line.arm.label]
        for rival, dash in zip(rivals, cycle(DASHES[1:]), strict=False):
            colour = rival.look.colour
            axes.axhline(rival.value, label=rival.line.method.name, color=colour, linestyle=dash)
        _bare(axes, "", name, ACCURACY)
    _legend(figure, panels[-1])
    return figure


def sensitivity(results: Results) -> Figure:
    """Accuracy of every run of the search, by method, with a dash for the median."""
    points: dict[str, list[float]] = defaultdict(list)
    for _, selected in results.variants:
        for run in selected.runs:
            if (chosen := best_step(run)) is not None:
                points[run.row.name].append(100 * chosen.accuracy)
    figure, (axes,) = _figure(1)
    known = looks(points)
    for x, (name, values) in enumerate(points.items()):
        jitter = [x + 0.25 * ((i * 0.618) % 1 - 0.5) for i in range(len(values))]
        axes.plot(jitter, values, linestyle="none", markersize=3, alpha=0.5, **known[name].marks)
        axes.plot([x], [statistics.median(values)], **_PAPER)
    axes.set_xticks(range(len(points)), list(points), rotation=60, ha="right")
    _bare(axes, "every run of the search", "", ACCURACY)
    return figure


def demo(results: Results) -> Figure:
    """Images of every domain, and accuracy against the time per step."""
    from matplotlib.figure import Figure

    from steppe.domains import load

    (dataset,) = results.order.datasets
    domains = load(dataset).domains
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    halves = figure.add_gridspec(1, 2)
    left, right = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    left.suptitle("the domains", fontsize=9)
    for row, domain in zip(left.subplots(len(domains), 8), domains, strict=True):
        for number, axes in enumerate(row):
            pixels = domain.images[number]
            axes.imshow(pixels.squeeze(), cmap="gray" if pixels.shape[2] == 1 else None)
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(domain.name, fontsize=7, rotation=0, ha="right", va="center")
    axes = right.subplots()
    for point in _averages(results)[dataset]:
        x = 1e3 * point.spent.step.seconds_per_step
        _mark(axes, x, point, point.line.method.name)
    axes.margins(0.15)
    _bare(axes, "accuracy against cost", "milliseconds per step", ACCURACY)
    return figure
