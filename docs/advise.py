"""Makes the tables and figures of the page on `steppe advise` from its two tables of tasks.

    python docs/advise.py      # seconds; `make results`

The model that is evaluated is the one that `steppe advise` uses. What else is tried here is marked
as such on the page: choosing the best of several would need further tasks to test it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import fill
from scipy import stats

from steppe.domains import Domain
from steppe.reports.palette import looks
from steppe.study.advice.advising import fitted
from steppe.study.advice.associations import associations
from steppe.study.advice.calibration import calibration, held_out_probabilities
from steppe.study.advice.extent import BASELINE, GAIN, PROBED
from steppe.study.advice.indicators import INDICATORS
from steppe.study.advice.ranking import fit, relative
from steppe.study.advice.regret import Estimate, Evaluation, evaluate, transferred
from steppe.study.advice.strategies import advised, strategies
from steppe.study.advice.table import SHIPPED, Example, read_table

DOCS = Path(__file__).parent
PAGES = tuple(
    DOCS / page
    for page in (
        "results/advise.md",
        "results/advise-indicators.md",
        "results/advise-tasks.md",
        "reference/study.md",
    )
)
REAL = DOCS.parent / "benchmarks/advise-real-cpu.json"
FIGURES = DOCS / "results/advise"
MEASURED = tuple(one.name for one in INDICATORS if "gain" not in one.name)
GAINS = tuple(one.name for one in INDICATORS if "gain" in one.name)
VARIANTS = {
    "leads in short runs, without other indicators": advised(()),
    "all indicators, leads among them (the first model)": advised(short_runs=False),
    "the loss alone": advised(MEASURED[:6], short_runs=False),
    "short runs alone": advised(("validation", "left-out", *GAINS), short_runs=False),
    "nothing: the best on average": advised((), short_runs=False),
}
"""Other models. All but the first were fixed before any score was seen."""
NAMES = {
    "advised": "**`steppe advise`**",
    "average": "best on average over the other tasks",
    "probes": "best of the short runs on left-out sources",
    "always:adamw": "always AdamW",
    "always:fad": "always FAD",
    "random": "random",
}
STYLES = {
    "light": ("#333333", "#dddddd", "#ffffff"),
    "dark": ("#d5d7de", "#454854", "#1e2129"),
}
"""Ink, faint lines and background of the site's palettes."""
PERMUTATIONS = 99_999
"""Of families. With the default of 4,999, a p value near 0.05 depends on the draw."""
Rows = list[tuple[str, ...]]


def rows(*cells: tuple[str, ...]) -> str:
    """A table in Markdown; the first row is its header."""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]) + "\n"


def said(found: Estimate, sign: str = "", digits: int = 1) -> str:
    form = f"{sign}.{digits}f"
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


def probed(examples: Sequence[Example]) -> tuple[list[Example], dict[str, str]]:
    """Examples with the baseline's gain over itself, so that the short runs can be compared."""
    found = [
        replace(one, indicators={**one.indicators, GAIN.format(BASELINE): 0.0}) for one in examples
    ]
    return found, {name: GAIN.format(name) for name in PROBED}


def evaluated(examples: Sequence[Example], by: str = "family") -> Evaluation:
    found, places = probed([fitted(one) for one in examples])
    return evaluate(found, strategies(found, places) | VARIANTS, by)  # type: ignore[arg-type]


def regret_table(examples: Sequence[Example]) -> str:
    families, bases = evaluated(examples), evaluated(examples, "base")
    head = ("choice", "regret", "the advice's regret minus this", "regret, other images held out")
    return rows(
        head,
        *(
            (
                words,
                said(families.regret(name)),
                "" if name == "advised" else said(families.difference("advised", name), "+"),
                said(bases.regret(name)),
            )
            for name, words in NAMES.items()
        ),
    )


def family_table(examples: Sequence[Example]) -> str:
    """Each family's lead over the baseline, averaged over its variants, with seeds as the unit."""
    against = ("fad", "sam", "sgd", "msam")
    head = ("family", *(f"{name} - {BASELINE}" for name in against))
    cells: list[tuple[float, tuple[str, ...]]] = []
    for family in dict.fromkeys(one.family for one in examples):
        own = [one for one in examples if one.family == family]
        row = []
        for name in against:
            by_seed = np.mean(
                [np.subtract(one.scores[name], one.scores[BASELINE]) for one in own], axis=0
            )
            reach = float(stats.t.ppf(0.975, len(by_seed) - 1) * stats.sem(by_seed))
            row.append((float(by_seed.mean()), reach))
        cells.append((row[0][0], (family, *(f"{m:+.1f} ± {r:.1f}" for m, r in row))))
    return rows(head, *(row for _, row in sorted(cells, key=lambda cell: -cell[0])))


def model_table(examples: Sequence[Example]) -> str:
    found = evaluated(examples)
    head = ("prediction from", "regret, family held out", "minus that of `steppe advise`")
    return rows(
        head,
        (
            "leads, then all indicators (`steppe advise`)",
            said(found.regret("advised")),
            "",
        ),
        *(
            (name, said(found.regret(name)), said(found.difference(name, "advised"), "+"))
            for name in VARIANTS
        ),
    )


def optimizer_table(examples: Sequence[Example]) -> str:
    """How every optimizer does on average, and on how many tasks it is measured to be the best."""
    y, names = relative(examples), tuple(examples[0].scores)
    found = evaluated(examples)
    wins = np.bincount(y.argmax(1), minlength=len(names))
    order = sorted(range(len(names)), key=lambda i: found.regret(f"always:{names[i]}").mean)
    head = ("optimizer", "regret if always taken", "tasks on which its mean is the highest")
    return rows(
        head,
        *((names[i], said(found.regret(f"always:{names[i]}")), str(int(wins[i]))) for i in order),
    )


def association_table(examples: Sequence[Example]) -> str:
    logs = [fitted(one) for one in examples]
    against = ("fad", "sam", "sgd")
    found = {
        name: {a.indicator: a for a in associations(logs, name, permutations=PERMUTATIONS)}
        for name in against
    }
    head = ("indicator", *(f"{name} - {BASELINE}" for name in against))
    return rows(
        head,
        *(
            (
                one.name,
                *(
                    _cell(found[name][one.name].rho, found[name][one.name].adjusted)
                    for name in against
                ),
            )
            for one in INDICATORS
        ),
    )


def _cell(rho: float, p: float) -> str:
    text = f"{rho:+.2f}"
    return f"**{text}** (p = {p:.3f})" if p < 0.05 else text


def calibration_table(examples: Sequence[Example]) -> str:
    logs = [fitted(one) for one in examples]
    found = calibration(logs, held_out_probabilities(logs))
    head = ("forecast probability", "forecasts", "mean forecast", "best that often")
    return rows(
        head,
        *(
            (
                f"{100 * b.low:.0f}% to {100 * b.high:.0f}%",
                str(b.count),
                f"{100 * b.forecast:.0f}%",
                f"{100 * b.frequency:.0f}%",
            )
            for b in found.bins
            if b.count
        ),
    ) + (
        f"\nBrier score {said(found.brier, '', 2)}, against {said(found.brier_uniform, '', 2)} for "
        f"equal probabilities (lower is better). Log score: {said(found.gain, '+', 2)} nats over "
        "equal probabilities (higher is better).\n"
    )


def task_table(examples: Sequence[Example]) -> str:
    first = ("adamw", "fad", "sam")
    names = (*first, *(name for name in examples[0].scores if name not in first))
    return rows(
        ("task", *names),
        *((one.task, *_bold([fmean(one.scores[name]) for name in names])) for one in examples),
    )


def _bold(values: Sequence[float]) -> list[str]:
    best = max(values)
    return [f"**{value:.1f}**" if value == best else f"{value:.1f}" for value in values]


def indicator_table() -> str:
    head = ("indicator", "what it is", "from")
    return rows(head, *((one.name, one.meaning, one.citation) for one in INDICATORS))


def real_tables(examples: Sequence[Example], real: Sequence[Example]) -> dict[str, str]:
    known, others = ([fitted(one) for one in some] for some in (examples, real))
    model = fit(known)
    head = ("target", "advice", "P(best)", "its accuracy", BASELINE, "fad", "best")
    cells: Rows = []
    for one in others:
        forecast = model.predict(one.indicators)
        name = max(forecast.mean, key=forecast.mean.__getitem__)
        means = {key: fmean(values) for key, values in one.scores.items()}
        best = max(means, key=means.__getitem__)
        shown = (means[name], means[BASELINE], means["fad"])
        cells.append(
            (
                one.task,
                name,
                f"{100 * forecast.best[name]:.0f}%",
                *(f"{value:.1f}" for value in shown),
                f"{best} {means[best]:.1f}",
            )
        )
    (known, places), others = probed(known), probed(others)[0]
    found = transferred(known, others, strategies(known, places)).regrets
    groups = list(dict.fromkeys(one.family for one in real))
    summary = [
        (
            NAMES[key],
            f"{fmean(values.values()):.1f}",
            *(f"{fmean(values[o.task] for o in real if o.family == g):.1f}" for g in groups),
        )
        for key in NAMES
        for values in [found[key]]
    ]
    return {
        "real targets": rows(head, *cells),
        "real regrets": rows(("choice", "mean regret", *groups), *summary),
    }


def draw(examples: Sequence[Example]) -> None:
    """Draw the figures in the light and the dark palette of the site."""
    for style, (ink, faint, back) in STYLES.items():
        for name, paint, size in (
            ("regret", regret_figure, (5.4, 2.6)),
            ("tasks", tasks_figure, (5.4, 6.4)),
        ):
            figure = Figure(figsize=size, layout="constrained", facecolor=back)
            axes = figure.add_subplot(facecolor=back)
            axes.tick_params(colors=ink, labelsize=8)
            for spine in axes.spines.values():
                spine.set_color(faint)
            paint(axes, examples, ink, faint, style)
            figure.savefig(FIGURES / f"{name}-{style}.svg", metadata={"Date": None})


def draw_images() -> None:
    """Draw two images of every domain of the plain tasks; the last domain is held out."""
    from steppe.domains import load
    from steppe.domains.tasks import TASKS

    plain = [task for task in TASKS if task.variant == "plain"]
    for style, (ink, _, back) in STYLES.items():
        figure = Figure(figsize=(5.4, 6.6), layout="constrained", facecolor=back)
        for row, task in zip(figure.subplots(len(plain), 1), plain, strict=True):
            domains = load(task.name).domains
            pairs = [_pair(domain) for domain in domains]
            row.imshow(np.concatenate(pairs, axis=1), interpolation="none")
            width = pairs[0].shape[1]
            for place, domain in enumerate(domains):
                at = (place + 0.4) * width, -1
                row.text(*at, domain.name, fontsize=6, color=ink, ha="center")
            row.text(-2, width / 5, task.family, fontsize=7, color=ink, ha="right", va="center")
            row.axis("off")
        figure.savefig(FIGURES / f"images-{style}.svg", metadata={"Date": None})


def _pair(domain: Domain) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Images of two classes side by side, and a transparent gap, as RGBA."""
    first, second = (int(np.flatnonzero(domain.labels == label)[0]) for label in (1, 3))
    pair = np.concatenate([domain.images[first], domain.images[second]], axis=1)
    size = len(pair)
    found = np.zeros((size, 5 * size // 2, 4), np.uint8)
    found[:, : 2 * size, :3], found[:, : 2 * size, 3] = pair, 255
    return found


def regret_figure(
    axes: Axes, examples: Sequence[Example], ink: str, faint: str, style: str
) -> None:
    found = evaluated(examples)
    names = list(NAMES)[::-1]
    known = looks(("adamw", "fad"))
    for place, name in enumerate(names):
        one = found.regret(name)
        look = known.get(name.removeprefix("always:"))
        colour = ink if look is None else (look.dark if style == "dark" else look.colour)
        axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2)
        axes.plot([one.mean], [place], "o", color=colour, markersize=6)
    axes.set_yticks(range(len(names)), [NAMES[n].replace("*", "").replace("`", "") for n in names])
    axes.axvline(0, color=faint, linewidth=1.5)
    axes.grid(axis="x", color=faint, linewidth=0.6)
    axes.set_xlabel("regret in points, family held out (left is better)", color=ink, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def tasks_figure(axes: Axes, examples: Sequence[Example], ink: str, faint: str, style: str) -> None:
    y, names = relative(examples), tuple(examples[0].scores)
    reach = float(np.quantile(np.abs(y), 0.95))
    picture = axes.imshow(y, cmap="PuOr", vmin=-reach, vmax=reach, aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(examples)), [one.task for one in examples], fontsize=6)
    bar = axes.figure.colorbar(picture, ax=axes, shrink=0.4)  # type: ignore[union-attr]
    bar.ax.tick_params(colors=ink, labelsize=7)
    bar.set_label("points over the task's mean", color=ink, fontsize=7)


def tables() -> dict[str, str]:
    """Every table of the pages, by name."""
    examples, real = read_table(SHIPPED).examples, read_table(REAL).examples
    return {
        "regrets": regret_table(examples),
        "models": model_table(examples),
        "families": family_table(examples),
        "optimizers": optimizer_table(examples),
        "associations": association_table(examples),
        "calibration": calibration_table(examples),
        "indicators": indicator_table(),
        "scores": task_table(examples),
        "real scores": task_table(real),
        **real_tables(examples, real),
    }


if __name__ == "__main__":
    made = tables()
    for page in PAGES:
        page.write_text(fill(page.read_text(), made, Path(__file__).name))
    matplotlib.rcParams.update({"svg.hashsalt": "steppe", "svg.fonttype": "path"})
    draw(read_table(SHIPPED).examples)
    draw_images()
