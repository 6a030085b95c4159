"""The figures of the experiments, each from its results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.reports import Row, Run
from steppe.reports.selection import best_step
from steppe.reports.spectra import COLOURS, DASHES, MARKERS, line_style
from steppe.reports.tables import ALL

from .results import AVERAGE, Line, Results, costs, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER: dict[str, Any] = {"marker": "_", "color": "black", "linestyle": "none", "markersize": 12}
"""How the paper's numbers look."""


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
    """Below the panels, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False, fontsize=8)


def _style(results: Results, optimizer: str) -> dict[str, Any]:
    """The colour and dashes of an optimizer, the same in all figures of an experiment."""
    return line_style(results.order.experiment.optimizers.index(optimizer))


def _colour(results: Results, optimizer: str) -> str:
    return str(_style(results, optimizer)["color"])


def _averages(results: Results) -> dict[str, list[Line]]:
    """By dataset: every method's mean over targets."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines(results):
        if line.dataset != ALL and line.column == AVERAGE and line.cell is not None:
            found[line.dataset].append(line)
    return found


def _value(line: Line) -> float:
    assert line.cell is not None
    return line.cell.mean


def _error(line: Line) -> float:
    return 0.0 if line.cell is None else line.cell.err


def methods(results: Results) -> Figure:
    """Accuracy of every method, a panel per dataset; a line where the paper's is."""
    by_dataset = _averages(results)
    figure, panels = _figure(len(by_dataset))
    for axes, (dataset, own) in zip(panels, by_dataset.items(), strict=True):
        for x, line in enumerate(own):
            colour = _colour(results, line.method.optimizer)
            axes.errorbar(x, _value(line), yerr=_error(line), marker="o", color=colour, capsize=3)
            if line.paper is not None:
                axes.plot([x], [line.paper.value], **_PAPER)
        names = [line.method.name for line in own]
        axes.set_xticks(range(len(own)), names, rotation=60, ha="right")
        axes.margins(0.08, 0.15)
        _bare(axes, Path(dataset).name, "", "accuracy, per cent")
    if any(line.paper for own in by_dataset.values() for line in own):
        panels[0].plot([], [], **_PAPER, label="the paper's")
        _legend(figure, panels[0])
    return figure


def ratio(results: Results) -> Figure:
    """Accuracy against training time; FAD's ratios are joined by a line."""
    by_dataset, spent = _averages(results), costs(results)
    figure, panels = _figure(len(by_dataset))
    for axes, (dataset, own) in zip(panels, by_dataset.items(), strict=True):
        joined: list[tuple[float, float]] = []
        for line in own:
            x, y = spent[line.dataset, line.arm, line.method].seconds, _value(line)
            name = line.method.name if line.arm.value is None else f"{line.arm.value:.0%}"
            axes.errorbar(
                x,
                y,
                yerr=_error(line),
                marker="o",
                color=_colour(results, line.method.optimizer),
            )
            # The first ratios lie close together: every other one has its name below.
            place = (4, -11 if len(joined) % 2 else 4)
            axes.annotate(name, (x, y), xytext=place, textcoords="offset points", fontsize=8)
            if line.arm.value is not None:
                joined.append((x, y))
        if joined:
            axes.plot(*zip(*joined, strict=True), color=_colour(results, "fad"), label="FAD")
            axes.legend(frameon=False, fontsize=8)
        _bare(axes, Path(dataset).name, "seconds of training", "accuracy, per cent")
    return figure


def iterations(results: Results) -> Figure:
    """Accuracy against the number of updates, a line per method; dashed: the paper's."""
    by_dataset = _averages(results)
    figure, panels = _figure(len(by_dataset))
    for axes, (dataset, own) in zip(panels, by_dataset.items(), strict=True):
        by_method: dict[Row, list[Line]] = defaultdict(list)
        for line in own:
            by_method[line.method].append(line)
        for number, (method, some) in enumerate(by_method.items()):
            colour = _colour(results, method.optimizer)
            x = [results.order.steps(line.arm, dataset) - 1 for line in some]
            y = [_value(line) for line in some]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(x, y, color=colour, marker=marker, label=method.name)
            known = [(line.arm.steps, line.paper.value) for line in some if line.paper]
            if known and results.order.scale.share == 1:
                axes.plot(*zip(*known, strict=True), color=colour, linestyle=":", linewidth=1)
        _bare(axes, Path(dataset).name, "updates", "accuracy, per cent")
    _legend(figure, panels[-1])
    return figure


def convergence(results: Results) -> Figure:
    """Training loss against updates and against seconds, the mean over runs."""
    figure, (by_step, by_time) = _figure(2)
    for _, selected in results.variants:
        for row in selected.rows():
            runs = [chosen.run for place, chosen in selected.chosen.items() if place.row == row]
            steps, seconds, losses = _curve(runs)
            look = _style(results, row.optimizer)
            by_step.plot(steps, losses, label=row.name, **look)
            by_time.plot(seconds, losses, **look)
    for axes, x in ((by_step, "updates"), (by_time, "seconds of training")):
        axes.set_yscale("log")
        _bare(axes, "", x, "training loss")
    _legend(figure, by_step)
    return figure


def _curve(runs: Sequence[Run]) -> tuple[list[float], list[float], list[float]]:
    """Updates, seconds and training loss: means over runs, at the steps that all of them have."""
    curves: list[Mapping[int, tuple[float, float]]] = []
    for run in runs:
        curve, seconds, before = {}, 0.0, 0
        for record in run.records:
            seconds += (record.seconds_per_step or 0.0) * (record.step - before)
            before = record.step
            loss = record.loss.get("total", record.loss.get("loss"))
            if loss is not None:
                curve[record.step] = (seconds, loss)
        curves.append(curve)
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    means = [[statistics.fmean(c[step][i] for c in curves) for step in steps] for i in (0, 1)]
    return [float(step) for step in steps], means[0], means[1]


def ablation(results: Results) -> Figure:
    """A panel for each of FAD's hyper-parameters, with SGD and Adam as lines."""
    own = [line for some in _averages(results).values() for line in some]
    names = dict.fromkeys(arm.label.split()[0] for arm in results.order.arms if arm.label)
    figure, panels = _figure(len(names))
    for axes, name in zip(panels, names, strict=True):
        some = [line for line in own if line.arm.label.startswith(f"{name} ")]
        x = list(range(len(some)))
        y, errors = [_value(line) for line in some], [_error(line) for line in some]
        axes.errorbar(x, y, yerr=errors, marker="o", color=COLOURS[0], label="fad", capsize=2)
        axes.set_xticks(x, [f"{line.arm.value:g}" for line in some], fontsize=8)
        for number, line in enumerate(line for line in own if not line.arm.label):
            style: dict[str, Any] = {"color": COLOURS[number + 1], "linestyle": DASHES[number + 1]}
            axes.axhline(_value(line), label=line.method.name, **style)
        _bare(axes, "", name, "accuracy, per cent")
    _legend(figure, panels[-1])
    return figure


def sensitivity(results: Results) -> Figure:
    """The accuracy of every draw, by method; the line is the median."""
    points: dict[str, list[float]] = defaultdict(list)
    for _, selected in results.variants:
        for run in selected.runs:
            if (chosen := best_step(run)) is not None:
                points[run.row.name].append(100 * chosen.accuracy)
    figure, (axes,) = _figure(1)
    for x, values in enumerate(points.values()):
        jitter = [x + 0.25 * ((i * 0.618) % 1 - 0.5) for i in range(len(values))]
        axes.plot(jitter, values, "o", markersize=3, alpha=0.5, color=COLOURS[x % len(COLOURS)])
        axes.plot([x], [statistics.median(values)], **_PAPER)
    axes.set_xticks(range(len(points)), list(points), rotation=60, ha="right")
    _bare(axes, "every run of the search", "", "accuracy, per cent")
    return figure


def demo(results: Results) -> Figure:
    """Images of every domain, and accuracy against the time of a step."""
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
    axes, spent = right.subplots(), costs(results)
    for line in _averages(results)[dataset]:
        x = 1e3 * spent[dataset, line.arm, line.method].step.seconds_per_step
        y, name = _value(line), line.method.name
        axes.errorbar(x, y, yerr=_error(line), marker="o", color=_colour(results, name), capsize=3)
        axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.margins(0.15)
    _bare(axes, "accuracy against cost", "milliseconds per step", "accuracy, percent")
    return figure
