"""Figures of Hessian spectra, largest eigenvalues and traces, as in the paper's Figure 3."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.durable import replace
from steppe.errors import UserError

from .curvature import Comparison, MethodCurvature
from .measured import described
from .palette import Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from steppe.measure import Measured

FORMATS = ("svg", "png", "pdf")
WIDE = 10.0
"""Eigenvalues that differ by more than this factor get a log scale."""
LOWEST = 1e-7
"""Densities below this fraction of the highest are cut off."""
BARE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
_LONGEST = 28
"""Maximum length of a method's name, in characters."""


def check_format(path: Path) -> str:
    """The image format that a file name's extension asks for."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise UserError(f"{path}: the name of a figure must end in one of .{', .'.join(FORMATS)}")
    return ending


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a comparison into an .svg, .png or .pdf file."""
    save_figure(make_figure(comparison), path)


def draw_measured(measured: Measured, path: Path) -> None:
    """Draw the spectrum of one measurement, and its density if that was estimated."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = 1 if measured.density is None else 2
    figure = Figure(figsize=(5 * panels, 3.4), layout="constrained")
    with matplotlib.rc_context(BARE):
        spectrum, *beside = figure.subplots(1, panels, squeeze=False)[0]
    values, look = measured.eigenvalues.values, Look(0)
    spectrum.plot(range(1, len(values) + 1), values, marker="o", markersize=4, **line_style(look))
    _finish_spectra(spectrum, values)
    for axes in beside:
        _draw_densities(axes, [(measured, look)])
    title = textwrap.fill(f"Hessian of the {described(measured)}", 75 * panels)
    figure.suptitle(title.replace("$", r"\$"), fontsize=8, color="#444")
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to an .svg, .png or .pdf file."""
    ending = check_format(path)
    import matplotlib

    # Text stays text in SVG, and repeated writes give identical files.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "steppe", "font.size": 9}
    with matplotlib.rc_context(settings):
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=ending, dpi=160, metadata=stamp)
    replace(path, drawn.getvalue())


def make_figure(comparison: Comparison) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    methods = comparison.methods
    labels = [_label(method) for method in methods]
    columns = 5 if max(map(len, labels)) <= 24 else 3
    height = max(3.4, 1.4 + 0.25 * len(methods)) + 0.2 * -(-len(methods) // columns)
    known = looks(method.row.name for method in methods)
    densities = [
        (one.measured, known[method.row.name])
        for method in methods
        for one in method.runs
        if one.measured.density is not None
    ]
    figure = Figure(figsize=(13 if densities else 10, height), layout="constrained")
    ratios = (2.1, 1.5, 1, 1) if densities else (2.1, 1, 1)
    with matplotlib.rc_context(BARE):
        spectra, *middle, largest, traces = figure.subplots(1, len(ratios), width_ratios=ratios)
    _draw_spectra(spectra, methods, known)
    for axes in middle:
        _draw_densities(axes, densities)
    _draw_bars(largest, methods, known, "lambda_max", "largest eigenvalue")
    _draw_bars(traces, methods, known, "trace", "trace")
    traces.set_yticklabels([])
    figure.legend(
        loc="outside lower center", ncols=columns, frameon=False, fontsize=8, handlelength=3.5
    )
    about = textwrap.fill(f"Hessian of the {comparison.about}", 150)
    errors = textwrap.fill(f"error bars: {comparison.errors}", 150)
    figure.suptitle(f"{about}\n{errors}".replace("$", r"\$"), fontsize=8, color="#444")
    return figure


def line_style(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "linestyle": look.dash}


def _draw_spectra(
    axes: Axes, methods: Sequence[MethodCurvature], known: Mapping[str, Look]
) -> None:
    top = len(methods[0].spectrum)
    ranks, step = range(1, top + 1), max(1, top // 10)
    alone = "_" if top == 1 else ""  # a line through one point is invisible
    for i, method in enumerate(methods):
        look = known[method.row.name]
        style = line_style(look)
        if len(method.runs) > 1:
            for spectrum in method.spectra:
                axes.plot(ranks, spectrum, linewidth=0.7, alpha=0.5, marker=alone, **style)
        axes.plot(
            ranks,
            method.spectrum,
            linewidth=2.0,
            markersize=4,
            # Staggered so that the markers of close lines do not overlap.
            markevery=(i % min(5, step), step),
            label=_label(method),
            **style | look.marks,
        )
    _finish_spectra(axes, [value for m in methods for values in m.spectra for value in values], top)


def _finish_spectra(axes: Axes, values: Sequence[float], top: int = 0) -> None:
    from matplotlib.ticker import MaxNLocator

    if min(values) > 0 and max(values) > WIDE * min(values):
        axes.set_yscale("log")
    elif min(values) < 0 < max(values):
        axes.axhline(0, color="#888", linewidth=0.8)
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue")
    axes.set_xlim(0.5, (top or len(values)) + 0.5)
    # By default the locator wants two ticks, and adds fractions if there is one rank.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(visible=True, color="#ddd", linewidth=0.6)


def _draw_densities(axes: Axes, found: Sequence[tuple[Measured, Look]]) -> None:
    highest = 0.0
    for measured, look in found:
        curve = measured.density
        assert curve is not None
        axes.plot(curve.grid, curve.values, linewidth=1.2, **line_style(look))
        highest = max(highest, *curve.values)
    axes.set_yscale("log")  # nearly all eigenvalues are close to 0
    axes.set_ylim(highest * LOWEST, highest * 3)
    axes.set_xlabel("eigenvalue")
    axes.set_ylabel("spectral density")
    axes.grid(visible=True, color="#ddd", linewidth=0.6)


def _draw_bars(
    axes: Axes,
    methods: Sequence[MethodCurvature],
    known: Mapping[str, Look],
    key: str,
    title: str,
) -> None:
    for i, method in enumerate(methods):
        value, colour = method.spread(key), known[method.row.name].colour
        axes.barh(i, value.mean, height=0.62, color=colour, alpha=0.35, edgecolor=colour)
        if value.err is not None:
            axes.errorbar(value.mean, i, xerr=value.err, color=colour, capsize=3, linewidth=1.5)
    axes.set_yticks(range(len(methods)), [_clip(method.row.name) for method in methods])
    axes.set_ylim(len(methods) - 0.4, -0.6)  # the first on top
    axes.set_xlabel(title)
    axes.locator_params(axis="x", nbins=4)
    axes.grid(visible=True, axis="x", color="#ddd", linewidth=0.6)
    axes.tick_params(axis="y", length=0)


def _label(method: MethodCurvature) -> str:
    n = len(method.runs)
    return _clip(method.row.name) + (f" (mean of {n} runs)" if n > 1 else "")


def _clip(name: str) -> str:
    short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return short.replace("$", r"\$")  # matplotlib would typeset it as math
