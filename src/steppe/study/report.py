"""The report on a study: verdicts in words, then the figure, the numbers and how to rerun it."""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from steppe import console
from steppe.errors import UserError
from steppe.reports.differences import between
from steppe.reports.render import TextCell, TextTable, escape_markdown, to_markdown, to_terminal
from steppe.reports.values import dumps
from steppe.strangers import printable

from .decide import Ruling, tuned, twin_slots
from .outcomes import Slot, hours
from .rounds import Study

_VERBS = {"better": "beats", "worse": "is worse than"}


def study_report(study: Study) -> dict[str, Any]:
    """Everything that a report shows, as plain values."""
    design = study.plan.design
    return {
        "study": study.plan.digest,
        "steppe": study.plan.steppe,
        "dataset": design.dataset,
        "targets": list(design.targets),
        "endpoint": design.endpoint,
        "selection": design.selection,
        "smallest effect": design.smallest_effect,
        "alpha": design.alpha,
        "over": study.state.over,
        "claims": [_claim(study, ruling) for ruling in study.state.rulings],
        "methods": [_method(study, method.name) for method in design.methods],
        "rounding": rounding(study),
        "hours": {kind: hours(study.outcomes, [kind]) for kind in ("tune", "run", "twin")},
        "devices": sorted({one.device for one in study.outcomes.values() if one.device}),
        "budget hours": design.budget_hours,
        "commands": [*study.plan.commands, "steppe study run DIR"],
        "design": design.model_dump(mode="json"),
    }


def _claim(study: Study, ruling: Ruling) -> dict[str, Any]:
    claim, design = ruling.claim, study.plan.design
    return {
        "a": claim.a,
        "b": claim.b,
        "confirmatory": claim.confirmatory,
        "added after": claim.added_after,
        "verdict": ruling.verdict,
        "open": ruling.open,
        "reason": ruling.reason,
        "level": 1 - (design.level if claim.confirmatory else design.alpha),
        "looks": [vars(look) for look in ruling.looks],
        "over targets": _over_targets(study, ruling),
        "raw weights": _raw_weights(study, ruling),
    }


def _pairs(study: Study, ruling: Ruling, of: str) -> tuple[dict[Any, float], dict[Any, float]]:
    """Accuracies of both methods on the seeds that a ruling looked at, as shares."""
    seeds = range(ruling.last.seeds if ruling.last else 0)
    found: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
    for accuracies, name in zip(found, (ruling.claim.a, ruling.claim.b), strict=True):
        for seed in seeds:
            for target in study.plan.design.targets:
                outcome = study.outcomes.get(Slot("run", name, seed, target))
                value = None if outcome is None else getattr(outcome, of)
                if value is not None:
                    accuracies[study.plan.design.dataset, target, seed] = value / 100
    return found


def _over_targets(study: Study, ruling: Ruling) -> dict[str, Any] | None:
    """Student's interval with the targets as a random sample, not corrected for looking."""
    a, b = _pairs(study, ruling, "accuracy")
    if len(study.plan.design.targets) < 2 or not a:
        return None
    try:
        found = between((ruling.claim.a, a), (ruling.claim.b, b), over="targets")
    except UserError:
        return None
    return {"low": found.low, "high": found.high, "targets": found.units} if found.spread else None


def _raw_weights(study: Study, ruling: Ruling) -> float | None:
    """The mean difference before averaging, which decides nothing."""
    a, b = _pairs(study, ruling, "other")
    shared = a.keys() & b.keys()
    return 100 * fmean(a[key] - b[key] for key in shared) if shared else None


def _method(study: Study, name: str) -> dict[str, Any]:
    design = study.plan.design
    runs = {s: o for s, o in study.outcomes.items() if s.kind == "run" and s.method == name}
    worked = [(o.accuracy, o.seconds) for o in runs.values() if o.accuracy is not None]
    settings = {t: list(found) for t in design.targets if (found := _tuned(study, name, t))}
    return {
        "name": name,
        "accuracy": fmean(accuracy for accuracy, _ in worked) if worked else None,
        "seeds": len({slot.seed for slot in runs}),
        "seconds": fmean(seconds for _, seconds in worked) if worked else None,
        "tuned": settings,
    }


def _tuned(study: Study, name: str, target: str) -> tuple[str, ...]:
    tuning = any(slot.kind == "tune" and slot.method == name for slot in study.state.todo)
    return () if tuning else tuned(study.plan.design, study.outcomes, name, target)


def rounding(study: Study) -> dict[str, Any] | None:
    """How far twins end apart: the noise below which single runs say nothing."""
    found = []
    for slot in twin_slots(study.plan.design):
        pair = [study.outcomes.get(slot._replace(kind=kind)) for kind in ("twin", "run")]
        values = [one.accuracy for one in pair if one is not None]
        if len(values) == 2 and None not in values:
            found.append(values[0] - values[1])  # type: ignore[operator]
    if not found:
        return None
    rms = math.sqrt(fmean(d * d for d in found))
    return {"method": study.plan.design.claims[0].b, "pairs": len(found), "points": rms}


def sentence(found: Mapping[str, Any], smallest: float) -> str:
    """A verdict in words."""
    a, b, last = found["a"], found["b"], found["looks"][-1] if found["looks"] else None
    if last is None:
        why = found["reason"] or "not enough seeds yet"
        return f"{a} against {b}: undecided ({why})."
    seen = f"{_signed(last['mean'])} points{_range(last)}, {last['seeds']} seeds"
    if found["verdict"] == "equivalent":
        by = "1 point" if smallest == 1 else f"{smallest:g} points"
        return f"{a} and {b} are equivalent: they differ by less than {by} ({seen})."
    if found["verdict"] in _VERBS:
        return f"{a} {_VERBS[found['verdict']]} {b} ({seen})."
    why = f": {found['reason']}" if found["reason"] else ""
    return f"{a} against {b} is undecided{why} ({seen})."


def _range(values: Mapping[str, Any]) -> str:
    low, high = values["low"], values["high"]
    return f" [{_signed(low)}, {_signed(high)}]" if math.isfinite(high - low) else ""


def _signed(points: float) -> str:
    """With two digits: +0.04 is not zero, and a verdict depends on it. Never -0.00."""
    return f"{round(points, 2) + 0.0:+.2f}"


def summary(found: Mapping[str, Any]) -> list[str]:
    """The first screen: what is decided, and how sure it is."""
    confirmatory = [claim for claim in found["claims"] if claim["confirmatory"]]
    decided = sum(claim["verdict"] != "undecided" for claim in confirmatory)
    targets = len(found["targets"])
    of = "one target" if targets == 1 else f"these {targets} targets"
    return [
        f"{decided} of {len(confirmatory)} claims decided on {of} of {found['dataset']}"
        + ("." if found["over"] else "; the study is not over."),
        *(sentence(claim, found["smallest effect"]) for claim in confirmatory),
    ]


def notes(found: Mapping[str, Any]) -> list[str]:
    """What to know about the numbers."""
    share = 100 * (1 - found["alpha"])
    said = [
        f"Intervals over seeds hold at every look, for all confirmatory claims together, with "
        f"{share:g}% confidence. They are about these targets. Intervals over targets (Student's "
        "t, 95%) are about other targets and decide nothing."
    ]
    if found["endpoint"] == "average":
        said.append(
            "Raw weights: the difference before averaging, on the targets' test images alone. It "
            "decides nothing."
        )
    if (floor := found["rounding"]) is not None:
        said.append(
            f"Rounding: {floor['pairs']} runs of {floor['method']} repeated with another rounding "
            f"ended {floor['points']:.1f} points apart (root mean square, per target)."
        )
    if any(not claim["confirmatory"] for claim in found["claims"]):
        said.append("Exploratory claims are not corrected for their number, and prove nothing.")
    spent = sum(found["hours"].values())
    limit = "" if found["budget hours"] is None else f" of {found['budget hours']:g}"
    said.append(f"Spent: {spent:.2f}{limit} hours of runs.")
    said.append(f"Design {found['study']}, planned with steppe {found['steppe']}.")
    return said


def tables(found: Mapping[str, Any]) -> list[TextTable]:
    average = "averaged weights" if found["endpoint"] == "average" else "raw weights"
    claims = [_claim_row(claim) for claim in found["claims"]]
    head = ("claim", "verdict", "points", "over seeds", "over targets", "seeds", "raw weights")
    rows = [
        (one["name"], *(_number(one[key]) for key in ("accuracy", "seeds", "seconds")))
        for one in found["methods"]
    ]
    columns: tuple[str, ...] = ("method", "accuracy %", "seeds", "seconds per run")
    if any(one["tuned"] for one in found["methods"]):
        columns += ("tuned settings",)
        rows = [
            (*row, _settings(m["tuned"])) for row, m in zip(rows, found["methods"], strict=True)
        ]
    return [
        _table(f"Differences in target accuracy, {average}", head, claims, 2),
        _table("Methods (higher accuracy is better)", columns, rows, 1),
    ]


def _table(title: str, head: tuple[str, ...], rows: list[Any], names: int) -> TextTable:
    lines = tuple(tuple(TextCell(cell) for cell in row) for row in rows)
    return TextTable(title, head, lines, names)


def _claim_row(claim: Mapping[str, Any]) -> tuple[str, ...]:
    last = claim["looks"][-1] if claim["looks"] else None
    name = f"{claim['a']} - {claim['b']}" + ("" if claim["confirmatory"] else " (exploratory)")
    across, raw = claim["over targets"], claim["raw weights"]
    return (
        name,
        claim["verdict"] + (" so far" if claim["open"] else ""),
        "" if last is None else _signed(last["mean"]),
        "" if last is None else _range(last).strip(),
        "" if across is None else _range(across).strip(),
        "" if last is None else str(last["seeds"]),
        "" if raw is None else _signed(raw),
    )


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _settings(by_target: Mapping[str, list[str]]) -> str:
    """Tuned settings, with the targets that chose them."""
    groups: dict[str, list[str]] = {}
    for target, settings in by_target.items():
        groups.setdefault(" ".join(settings), []).append(target)
    if len(groups) < 2:
        return next(iter(groups), "")
    return "; ".join(f"{', '.join(targets)}: {text}" for text, targets in groups.items())


def to_text(study: Study, form: str) -> str:
    return FORMS[form](study_report(study))


def _terminal(found: Mapping[str, Any]) -> str:
    shown = console.printed([to_terminal(one) for one in tables(found)])
    first, last = (map(printable, lines) for lines in (summary(found), notes(found)))
    return "\n".join([*first, "", shown, *last]) + "\n"


def _markdown(found: Mapping[str, Any]) -> str:
    first, *claims = (escape_markdown(printable(line)) for line in summary(found))
    commands = "\n".join(map(printable, found["commands"]))
    return "\n".join(
        [
            f"{first}\n",
            *(f"- {claim}" for claim in claims),
            "",
            *(to_markdown(one) for one in tables(found)),
            *(f"- {escape_markdown(printable(note))}" for note in notes(found)),
            *("", "```bash", commands, "```"),
            "",
        ]
    )


def _html(found: Mapping[str, Any]) -> str:
    """One self-contained page, without scripts."""
    first, *claims = map(printable, summary(found))
    commands = "\n".join(map(printable, found["commands"]))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(first)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_CSS}</style></head><body><main>",
        f"<h1>{html.escape(first)}</h1><ul>",
        *(f"<li>{html.escape(claim)}</li>" for claim in claims),
        f"</ul><figure>{''.join(figures(found))}<figcaption>{_CAPTION}</figcaption></figure>",
        *(_html_table(one) for one in tables(found)),
        *(f"<p>{html.escape(note)}</p>" for note in map(printable, notes(found))),
        "<h2>Run it again</h2>",
        f"<pre>{html.escape(commands)}</pre>",
        "<details><summary>Design</summary>",
        f"<pre>{html.escape(json.dumps(found['design'], indent=1))}</pre>",
        "</details></main></body></html>",
    ]
    return "\n".join(parts) + "\n"


_CAPTION = (
    "Difference in target accuracy, in points: the interval over seeds at every look. The shaded "
    "band holds differences that do not matter. A claim ends when its interval excludes zero or "
    "lies within the band."
)
_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; }
figure { margin: 1rem 0; overflow-x: auto; background: white; border-radius: 4px; }
figure svg { width: 17rem; max-width: 100%; height: auto; }
figcaption { color: #444; font-size: .85rem; padding: 0 .5rem .5rem; }
.wide { overflow-x: auto; }
caption, td { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8884; text-align: right; }
th.name, td.name { text-align: left; }
pre { overflow-x: auto; font-size: .8rem; }
"""


def _html_table(made: TextTable) -> str:
    def line(tag: str, cells: list[str]) -> str:
        kinds = (' class="name"' if i < made.names else "" for i in range(len(cells)))
        found = zip(kinds, (html.escape(printable(cell)) for cell in cells), strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{text}</{tag}>' for kind, text in found)}</tr>"

    rows = "".join(line("td", [cell.text for cell in cells]) for cells in made.lines)
    head = line("th", list(made.headings))
    title = html.escape(made.title)
    return f'<div class="wide"><table><caption>{title}</caption>{head}{rows}</table></div>'


def figures(found: Mapping[str, Any]) -> list[str]:
    """An SVG for each confirmatory claim: its intervals over the looks."""
    claims = [claim for claim in found["claims"] if claim["confirmatory"]]
    return [_figure(claim, found["smallest effect"]) for claim in claims]


def reach(claim: Mapping[str, Any], smallest: float) -> float:
    """The end of a figure's axis: it shows the last interval, and clips wider ones before it."""
    ends = [claim["looks"][-1][key] for key in ("low", "high")] if claim["looks"] else []
    return float(1.15 * max(map(abs, (2 * smallest, *filter(math.isfinite, ends)))))


def _figure(claim: Mapping[str, Any], smallest: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = Figure(figsize=(3.4, 2.5), layout="constrained")
    ax = drawn.subplots()
    looks = [look for look in claim["looks"] if math.isfinite(look["high"])]
    ax.axhspan(-smallest, smallest, color="#0072b2", alpha=0.12, lw=0)
    ax.axhline(0, color="#666", lw=0.8)
    if looks:
        seeds, means, low, high = (
            [look[key] for look in looks] for key in ("seeds", "mean", "low", "high")
        )
        ax.fill_between(seeds, low, high, color="#c84f00", alpha=0.25, lw=0)
        ax.plot(seeds, means, color="#c84f00", marker="o", ms=3)
        ax.vlines(seeds[-1], low[-1], high[-1], color="#c84f00", lw=1.5)
        ax.set_xlim(seeds[0] - 1, seeds[-1] + 1)
    title = f"{claim['a']} - {claim['b']}: {claim['verdict']}"
    ax.set_title(printable(title), fontsize=9, parse_math=False)
    ax.set_xlabel("seeds")
    ax.set_ylabel("points")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(-reach(claim, smallest), reach(claim, smallest))
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "steppe", "font.size": 9}
    with matplotlib.rc_context(settings), io.StringIO() as text:
        drawn.savefig(text, format="svg", metadata={"Date": None})
        svg = text.getvalue()
    return svg[svg.index("<svg") :]


FORMS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "terminal": _terminal,
    "markdown": _markdown,
    "json": dumps,
    "html": _html,
}
