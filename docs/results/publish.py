"""Generate the tables, figures and values of the PACS pages from the stored records.

    python docs/results/publish.py      # seconds; `make results`
    python docs/results/publish.py --digits sweeps/digits   # the tutorial's sweep with 20 draws

The machine and versions in `results.json` describe the runs, so they are kept as stored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from scipy.special import stdtr

from steppe.environment import environment
from steppe.measure import load_measurements
from steppe.optim import optimizer_spec
from steppe.paper import Order, make_order, plan
from steppe.paper.figures import ablation as ablation_figure, methods as methods_figure
from steppe.paper.results import Results, gather, to_json
from steppe.paper.tables import tables
from steppe.reports import (
    Row,
    Run,
    across_datasets,
    compare,
    dataset_tables,
    draw,
    load_runs,
    paired,
    select_runs,
)
from steppe.reports.cells import Cell, cell_text
from steppe.reports.columns import PAIRED, values as plain_values
from steppe.reports.curvature import Comparison, MethodCurvature
from steppe.reports.differences import Paired
from steppe.reports.palette import looks
from steppe.reports.render import TextCell, TextTable, to_markdown
from steppe.reports.spectra import save_figure
from steppe.reports.tables import Selected, Table, TableRow
from steppe.study import Claim, Design, Method
from steppe.study.power import forecast
from steppe.study.sequence import first_look
from steppe.sweeps import read_plan

FOLDER = Path(__file__).parent / "pacs"
COMMAND = (
    "steppe reproduce table1 --scale small --factors 1,3,10 --root data "
    "--backbone tf_efficientnet_lite0 --weights tf_efficientnet_lite0.safetensors "
    "--set batch_size=8 --set checkpoint_every=500 --trials 6 --per-gpu 12 "
    "--optimizers adam,adamw,sgd,sam,gam,fad"
)
"""The command that makes these runs with the current version."""
OPTIMIZERS = ("fad", "adamw", "gam", "sam", "sgd", "adam")
LATER = frozenset({3, 4, 5})
"""Trials added after the first three had been seen; their models were measured."""
MEASURED = "sketch"
"""The held-out domain of the measured models."""
MEASURED_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name != "adamw")
"""The optimizers with a measured model in each of the later trials."""
PLAIN_ADAM = "adam, no decay"
SHARES = {"fad 5%": 0.05, "fad 10%": 0.1, "fad 50%": 0.5}
"""FAD in a share of the updates, SGD in the others."""
MORE = {
    "yogi": "yogi-none-trial?",
    "adabelief": "adabelief-none-trial?",
    PLAIN_ADAM: "adam-none-trial?-nodecay",
    **{name: f"fad-none-trial?-ratio{share:g}" for name, share in SHARES.items()},
}
"""What is compared on the first three trials, and the names of its runs."""
RIVALS = (
    *product(SHARES, ("sgd", "adam", "adamw", "sam", "gam", "fad")),
    *combinations(reversed(SHARES), 2),
    *product(("yogi", "adabelief", PLAIN_ADAM), ("fad", "adam", "adamw")),
)
"""The pairs that are compared on the first three trials."""
SINGLE = {
    **{name: f"{name}-none-trial0" for name in ("adam", "adamw", "sgd", "fad", "adahessian")},
    **{f"{name}, longer": f"{name}-none-trial0-steps15000" for name in ("adam", "adamw", "sgd")},
}
"""What is shown of the first trial, and the names of its runs."""
SHOWN = {
    "adam": "Adam",
    "adamw": "AdamW",
    **{name: name.upper() for name in ("sgd", "sam", "gam", "fad")},
}
"""The optimizers with six trials as pages write them, in the order of the home page."""
QUANTITIES = {"λ_max": "lambda_max", "trace": "trace", "R0": "zeroth", "R1": "first"}


def published(folder: Path) -> Results:
    """What the records give, as the command of `results.json` made them."""
    order = _order("table1", OPTIMIZERS, {"factors": (1.0, 3.0, 10.0), "trials": 6})
    sweep, rates = plan(order, folder)
    assert rates is not None, f"{folder}: not all runs that tune learning rates are there"
    found = gather(order, sweep, rates)
    ((_, selected),) = found.variants
    held_out = [
        run
        for run in selected.runs
        if run.targets == (MEASURED,)
        and run.trial in LATER
        and run.row.optimizer in MEASURED_OPTIMIZERS
    ]
    return replace(found, curvature=compare(held_out))


def _of_adamw(runs: Iterable[Run]) -> Comparison:
    """The measured models of AdamW: not all of the later trials' are."""
    held_out = [r for r in runs if (r.row.optimizer, r.targets) == ("adamw", (MEASURED,))]
    return compare([run for run in held_out if load_measurements(run.path)])


def _order(experiment: str, optimizers: Sequence[str], changes: Mapping[str, Any]) -> Order:
    options = {
        "backbone": "tf_efficientnet_lite0",
        "weights": "/weights/tf_efficientnet_lite0.safetensors",
        "root": "/data",
    }
    overrides = ("batch_size=8", "checkpoint_every=500")
    return make_order(
        experiment,
        "small",
        optimizers=optimizers,
        changes=changes,
        overrides=overrides,
        options=options,
    )


def tuned(folder: Path) -> object:
    """The learning rates of the optimizers that were added."""
    order = _order("table1", ("yogi", "adabelief", "adahessian"), {})
    sweep, rates = plan(order, folder)
    assert rates is not None, f"{folder}: not all runs that tune learning rates are there"
    return to_json(gather(order, sweep, rates))["learning rates"]


def ablated(folder: Path) -> Results:
    """What FAD's hyperparameters make of it, as far as it was run.

    The run of rho = 0.05 is that of alpha = 0.5 and of beta = 0.5 too: they are the defaults.
    """
    for run in sorted((folder / "runs").glob("*-rho0.05")):
        for same in ("alpha0.5", "beta0.5"):
            shutil.copytree(run, run.with_name(run.name.replace("rho0.05", same)))
    order = _order("ablation", (), {"trials": 1})
    sweep, rates = plan(order, folder)
    assert rates is not None
    return gather(order, sweep, rates)


def with_more(runs: Iterable[Run], folder: Path) -> list[Run]:
    """The runs of the first trials, and those of `MORE`, with the names that it has."""
    found = [run for run in runs if run.trial not in LATER]
    for name, pattern in MORE.items():
        some = [run for run in _named(folder, name, pattern) if run.trial not in LATER]
        assert len(some) == 4 * 3, f"{name}: {len(some)} runs"
        found += some
    return found


def _named(folder: Path, name: str, pattern: str) -> list[Run]:
    """The runs whose names end so, as those of an optimizer of that name."""
    runs = load_runs(sorted(folder.glob(f"*-{pattern}"))).runs
    return [replace(run, row=run.row._replace(optimizer=name)) for run in runs]


def twice(folder: Path) -> list[dict[str, Any]]:
    """AdamW and Adam without decay, where they have one learning rate: the same method, run twice.

    A decay of 1e-4 multiplies weights by 1 - 1.5e-8 in an update, which is 1 in float32.
    """
    again = {(r.targets, r.trial): r for r in _named(folder, PLAIN_ADAM, MORE[PLAIN_ADAM])}
    found = []
    for run in _named(folder, "adamw", "adamw-none-trial?"):
        other = again.get((run.targets, run.trial))
        if other and other.hparams["lr"] == run.hparams["lr"]:
            curves = [[(r.accuracy, r.loss) for r in one.records] for one in (run, other)]
            chosen = select_runs([run, other], "train-val").chosen
            accuracy = {place.row.optimizer: 100 * one.accuracy for place, one in chosen.items()}
            found.append(
                {
                    "target": run.targets[0],
                    "trial": run.trial,
                    "same": curves[0] == curves[1],
                    "accuracy": [accuracy["adamw"], accuracy[PLAIN_ADAM]],
                }
            )
    return found


def with_both(selected: Selected, pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All pairs, AdamW with the mean of its two runs where it has two.

    Args:
        selected: the runs of all.
        pairs: of `twice`.
    """
    accuracy = {
        (place.row.optimizer, place.column, place.trial): 100 * one.accuracy
        for place, one in selected.chosen.items()
    }
    targets, trials = (sorted({key[i] for key in accuracy}) for i in (1, 2))
    accuracy |= {("adamw", p["target"], p["trial"]): fmean(p["accuracy"]) for p in pairs}
    tables = {
        name: np.array([[accuracy[name, target, trial] for trial in trials] for target in targets])
        for name in OPTIMIZERS
    }
    differences: list[dict[str, Any]] = []
    raw: dict[str, dict[str, float]] = {}
    for (a, b), (over, axis) in product(
        combinations(OPTIMIZERS, 2), (("targets", 1), ("trials", 0))
    ):
        units = (tables[a] - tables[b]).mean(axis)
        test = scipy.stats.ttest_1samp(units, 0)
        low, high = (float(end) for end in test.confidence_interval(0.95))
        pair = {"a": a, "b": b, "difference": float(units.mean()), "low": low, "high": high}
        differences.append({**pair, "what": over})
        raw.setdefault(f"over {over}", {})[f"{a} - {b}"] = float(test.pvalue)
    p = {over: holm(values) for over, values in raw.items()}
    return {"mean": float(tables["adamw"].mean()), "pairs": differences, "p after Holm": p}


def passes(name: str) -> float:
    """How often an update evaluates the gradient, on average: a plain one does once."""
    optimizer = name.split()[0].rstrip(",")
    return 1 + SHARES.get(name, 1.0) * (optimizer_spec(optimizer).passes - 1)


def more_grid(table: Table, averages: Mapping[Row, Cell | None]) -> TextTable:
    """The first trials of everything, by what an update costs; the best are marked."""
    cells = {row.row: {**row.cells, "Avg.": averages[row.row]} for row in table.rows}
    columns = list(next(iter(cells.values())))
    best = {c: max(cell.mean for own in cells.values() if (cell := own[c])) for c in columns}
    lines = []
    for row in sorted(cells, key=lambda row: (passes(row.optimizer), row.optimizer)):
        marked = [
            TextCell(cell_text(cell), cell is not None and cell.mean == best[column])
            for column, cell in cells[row].items()
        ]
        lines.append((TextCell(row.optimizer), TextCell(f"{passes(row.optimizer):.3g}"), *marked))
    headings = ("method", "gradients per update", *columns)
    note = (
        "Mean ± standard error over seeds 0 to 2. fad 5%: FAD in 5% of the updates, SGD in the rest"
    )
    title = "Accuracy on the held-out domain, % (higher is better)"
    return TextTable(title, headings, tuple(lines), 1, note)


def single(folder: Path) -> dict[str, dict[str, Any]]:
    """What is shown of the first trial: accuracy by target in percent, and the steps selected."""
    found = {}
    for name, pattern in SINGLE.items():
        runs = _named(folder, name, pattern)
        chosen = {p.column: c for p, c in select_runs(runs, "train-val").chosen.items()}
        assert len(chosen) == 4, f"{name}: {len(chosen)} targets"
        cells = {target: 100 * one.accuracy for target, one in chosen.items()}
        found[name] = {
            "updates": max(run.records[-1].step for run in runs),
            "accuracy": {**cells, "Avg.": fmean(cells.values()), "last weights": _last(runs)},
            "steps": {target: one.step for target, one in chosen.items()},
        }
    return found


def _last(runs: Iterable[Run]) -> float:
    """The mean accuracy on the target after the last update, in percent."""
    return fmean(100 * run.records[-1].accuracy[run.targets[0], "test"] for run in runs)


def single_grid(values: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """The first trial of some, with what their updates cost."""
    lines = []
    for name, own in values.items():
        optimizer, updates = name.partition(",")[0], own["updates"]
        costs = (f"{updates:,}", f"{updates * passes(optimizer):,.0f}")
        numbers = [f"{value:.1f}" for value in own["accuracy"].values()]
        lines.append((TextCell(optimizer), *map(TextCell, (*costs, *numbers))))
    headings = ("method", "updates", "gradients", *values["fad"]["accuracy"])
    note = (
        "Seed 0. Last weights: average accuracy after the last update, without selecting a step. "
        "AdaHessian also differentiates its gradient once per update"
    )
    title = "Accuracy on the held-out domain, % (higher is better)"
    return TextTable(title, headings, tuple(lines), 1, note)


def effort_figure(rows: Iterable[TableRow]) -> Figure:
    """Accuracy against what an update costs; FAD's shares of the updates are joined."""
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axes = figure.subplots()
    joined, label = [], 0.0
    points = [(passes(r.row.optimizer), r.row.optimizer, r.cells["PACS"]) for r in rows]
    known = looks(["fad", *(name for _, name, _ in points if not name.startswith("fad"))])
    for x, name, cell in sorted(points, key=lambda point: (point[0], point[2] and point[2].mean)):
        assert cell is not None
        ours = name == "sgd" or name.startswith("fad")
        joined += [(x, cell.mean)] if ours else []
        look = known["fad" if name.startswith("fad") else name]
        axes.errorbar(x, cell.mean, yerr=cell.err, capsize=3, **look.marks)
        at, side, shift = (x, cell.mean), "left", (6, -11)
        if not ours:  # those at one gradient: each above the one before
            label = max(cell.mean, label + 0.3) if x == 1 else cell.mean
            at, side, shift = (x, label), "right", (-6, 3)
        axes.annotate(name, at, shift, textcoords="offset points", fontsize=8, ha=side)
    axes.plot(*zip(*joined, strict=True), color=known["fad"].colour, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("gradients per update, on average")
    axes.set_ylabel("accuracy (%)")
    axes.set_xticks([1, 2, 3, 4])
    axes.set_xlim(-0.1, 4.6)
    axes.margins(y=0.1)
    return figure


class Pair(NamedTuple):
    """A difference of two optimizers, over targets and over trials."""

    targets: Paired
    trials: Paired


def all_pairs(
    runs: Sequence[Run], names: Iterable[tuple[str, str]] = tuple(combinations(OPTIMIZERS, 2))
) -> list[Pair]:
    """Every optimizer against every other, or those that are named."""
    selected = select_runs(runs, "train-val")
    return [Pair(paired(selected, a, b), paired(selected, a, b, over="trials")) for a, b in names]


WORKERS = 12
"""Runs that shared the GPU."""
EFFECTS = (1.0, 2.0)
"""Smallest effects that may matter, in points."""
MOST = 1000
"""Seeds that the forecasts go up to."""


def what_it_takes(pairs: Iterable[Pair], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The seeds and GPU-hours after which 80% of studies would decide FAD's claims.

    The six seeds are the pilot: their differences give the spread over seeds.
    """
    claims = [pair.trials for pair in pairs if pair.trials.a == "fad"]
    seconds = {
        name: fmean(run.seconds for run in runs if run.row.optimizer == name) for name in OPTIMIZERS
    }
    found = []
    for one in claims:
        spread = one.err * float(np.sqrt(one.units))
        needs = {}
        for effect in EFFECTS:
            design = Design(
                dataset="PACS",
                targets=("one",),
                methods=tuple(Method(name=name, optimizer=name) for name in OPTIMIZERS),
                claims=tuple(Claim(a=claim.a, b=claim.b) for claim in claims),
                smallest_effect=effect,
                first_seeds=first_look(0.05 / len(claims)),
                max_seeds=MOST,
            )
            needs[f"{effect:g}"] = {
                "apart": forecast(design, spread, effect, design.level).enough,
                "same": forecast(design, spread, 0.0, design.level).enough,
            }
        # Both methods on four targets, for every seed.
        hours = one.targets * (seconds[one.a] + seconds[one.b]) / 3600 / WORKERS
        found.append({"b": one.b, "spread": spread, "seeds": needs, "hours per seed": hours})
    return found


def power_table(needs: Iterable[Mapping[str, Any]]) -> str:
    """A line per claim: seeds to see an effect or its absence, and GPU-hours for the longer one."""
    lines = []
    for one in needs:
        cells = []
        for seeds in one["seeds"].values():
            longest = max(seeds.values())
            cells += [str(seeds["apart"]), str(seeds["same"])]
            cells.append(f"{longest * one['hours per seed']:.1f}")
        lines.append((f"FAD - {SHOWN[one['b']]}", f"{one['spread']:.1f}", *cells))
    headings = [
        text
        for effect in EFFECTS
        for text in (
            f"seeds if {effect:g} point{'s' * (effect != 1)} apart",
            f"seeds if equal (within {effect:g})",
            "GPU-hours",
        )
    ]
    return plain_table(("claim", "spread", *headings), lines)


PAIR_HEADINGS = ("difference", "95% CI across targets", "95% CI across seeds")


def pairs_grid(pairs: Iterable[Pair]) -> TextTable:
    """One line per pair, with its intervals; those that exclude zero are bold."""
    lines = [(TextCell(f"{pair.targets.a} - {pair.targets.b}"), *_cells(pair)) for pair in pairs]
    title = "Paired differences in accuracy, points"
    note = "Bold: the interval excludes zero, before correction for the number of pairs"
    return TextTable(title, ("methods", *PAIR_HEADINGS), tuple(lines), 1, note)


def _both_ways(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """The corrected p-values over targets and over trials."""
    return {
        "over targets": corrected(pair.targets for pair in pairs),
        "over trials": corrected(pair.trials for pair in pairs),
    }


def _cells(pair: Pair) -> list[TextCell]:
    intervals = [TextCell(f"{one.low:+.1f} to {one.high:+.1f}", one.clear) for one in pair]
    return [TextCell(f"{pair.targets.difference:+.1f}"), *intervals]


def corrected(differences: Iterable[Paired]) -> dict[str, float]:
    """The p-values of their t-tests, after Holm's correction."""
    return holm(
        {
            f"{one.a} - {one.b}": 2 * float(stdtr(one.units - 1, -abs(one.difference) / one.err))
            for one in differences
        }
    )


def holm(raw: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction of p-values for their number."""
    found, largest = {}, 0.0
    for number, name in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - number) * raw[name]))
        found[name] = largest
    return found


class Ratio(NamedTuple):
    """By what factor a quantity of one optimizer's models differs from another's.

    The geometric mean over pairs of the same trial, with its 95% interval.
    """

    a: str
    b: str
    quantity: str
    factor: float
    low: float
    high: float


def all_ratios(compared: Comparison) -> list[Ratio]:
    """FAD's models and SAM's against every other optimizer's, in every quantity."""
    by_trial = {
        method.row.optimizer: {
            one.run.trial: values for one, values in zip(method.runs, runs, strict=True)
        }
        for method, runs in _with_values(compared)
    }
    rivals = [("fad", name) for name in MEASURED_OPTIMIZERS[1:]]
    rivals += [("sam", name) for name in MEASURED_OPTIMIZERS[1:] if name != "sam"]
    found = []
    for (a, b), quantity in product(rivals, QUANTITIES.values()):
        ours, theirs = (
            np.log([by_trial[name][trial][quantity] for trial in sorted(LATER)]) for name in (a, b)
        )
        interval = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        numbers = (float(np.mean(ours - theirs)), *interval)
        found.append(Ratio(a, b, quantity, *(float(np.exp(number)) for number in numbers)))
    return found


def _with_values(compared: Comparison) -> list[tuple[MethodCurvature, list[dict[str, float]]]]:
    """The methods, each with the numbers of its runs."""
    values = [method["runs"] for method in compared.to_json()["methods"]]
    return list(zip(compared.methods, values, strict=True))


def ratios_grid(ratios: Iterable[Ratio]) -> TextTable:
    """A line for each pair of optimizers; a factor whose interval excludes one is marked."""
    by_pair: dict[str, list[TextCell]] = {}
    for one in ratios:
        text = f"{one.factor:.2f} ({one.low:.2f} to {one.high:.2f})"
        clear = one.high < 1 or one.low > 1
        by_pair.setdefault(f"{one.a} / {one.b}", []).append(TextCell(text, clear))
    lines = [(TextCell(names), *cells) for names, cells in by_pair.items()]
    note = "Geometric mean of the paired ratios over three seeds (95% CI). Bold: the CI excludes 1"
    title = "Ratios of curvature (below 1: the first method is flatter)"
    return TextTable(title, ("methods", *QUANTITIES), tuple(lines), 1, note)


def with_accuracy(compared: Comparison) -> dict[str, Any]:
    """The accuracy on the target of the weights that were measured, and what goes with it.

    Rank correlations are over all models, and within a trial, whose models have learned from the
    same images: the mean over the trials.
    """
    models = [
        {
            **values,
            "optimizer": method.row.optimizer,
            "trial": one.run.trial,
            "accuracy": 100 * one.run.records[-1].accuracy[MEASURED, "test"],
        }
        for method, runs in _with_values(compared)
        for one, values in zip(method.runs, runs, strict=True)
    ]
    by_optimizer = {
        name: [model["accuracy"] for model in models if model["optimizer"] == name]
        for name in MEASURED_OPTIMIZERS
    }
    correlations = {}
    for quantity in QUANTITIES.values():
        result = scipy.stats.spearmanr(*_columns(models, quantity))
        low, high = _fisher(float(result[0]), len(models))
        within = [
            scipy.stats.spearmanr(*_columns([m for m in models if m["trial"] == t], quantity))[0]
            for t in sorted(LATER)
        ]
        correlations[quantity] = {
            "all": float(result[0]),
            "interval": [low, high],
            "within trials": float(np.mean(within)),
        }
    return {"accuracy": by_optimizer, "rank correlations": correlations}


def _columns(models: Sequence[Mapping[str, Any]], quantity: str) -> list[list[float]]:
    return [[model[name] for model in models] for name in (quantity, "accuracy")]


def _fisher(correlation: float, n: int) -> tuple[float, float]:
    """The 95% interval of a rank correlation, by Fisher's transformation (Bonett and Wright)."""
    reach = 1.96 * np.sqrt((1 + correlation**2 / 2) / (n - 3))
    low, high = np.tanh(np.arctanh(correlation) + np.array([-reach, reach]))
    return float(low), float(high)


def rates_grid(rates: TextTable) -> TextTable:
    """The learning rates without the column of the dataset, which is always PACS."""
    return replace(
        rates,
        title="Learning rates",
        headings=("held out", *rates.headings[2:]),
        lines=tuple(line[1:] for line in rates.lines),
        names=rates.names - 1,
        note="Chosen by validation on the training domains, in runs of 300 updates with seed 0",
    )


def plain_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table for the middle of a page: no title, no note, and formulas are kept."""
    rules = ["---", *["--:"] * (len(headings) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rules, *lines))


def home_table(results: Iterable[Mapping[str, Any]]) -> str:
    """The averages that the home page shows, and what an update costs."""
    averages = {r["optimizer"]: r for r in results if r["column"] == "Avg."}
    lines = [
        (shown, f"{averages[name]['mean']:.1f} ± {averages[name]['err']:.1f}", f"{passes(name):g}")
        for name, shown in SHOWN.items()
    ]
    return plain_table(("optimizer", "PACS, held-out domains", "passes"), lines)


def landing_table(accuracy: TextTable) -> TextTable:
    """Our accuracies, averages first; of the paper's, only the averages, in their own column.

    Args:
        accuracy: the table with the paper's in parentheses, `Avg.` in the last column.
    """
    lines = []
    for method, *cells in accuracy.lines:
        split = [cell.text.partition(" (") for cell in cells]
        ours = [TextCell(text, cell.best) for (text, _, _), cell in zip(split, cells, strict=True)]
        lines.append((method, ours[-1], TextCell(split[-1][2].rstrip(")")), *ours[:-1]))
    headings = ("method", "Avg.", "paper's Avg.", *accuracy.headings[1:-1])
    note = "Mean ± standard error over six seeds"
    return replace(accuracy, headings=headings, lines=tuple(lines), note=note)


def adamw_table(adamw: Comparison, others: Comparison) -> str:
    """The measured models of AdamW beside those of Adam and FAD with the same seeds."""
    models = {
        (method.row.optimizer, one.run.trial): (one.run, values)
        for compared in (adamw, others)
        for method, runs in _with_values(compared)
        for one, values in zip(method.runs, runs, strict=True)
    }
    trials = sorted(trial for name, trial in models if name == "adamw")
    lines = []
    for name in ("adamw", "adam", "fad"):
        rows = [
            (
                f"{values['lambda_max']:.1f}",
                f"{values['trace']:.0f}",
                f"{values['zeroth']:.2f}",
                f"{values['first']:.2f}",
                f"{100 * run.records[-1].accuracy[MEASURED, 'test']:.1f}",
            )
            for run, values in (models[name, trial] for trial in trials)
        ]
        lines.append((SHOWN[name], *map(", ".join, zip(*rows, strict=True))))
    headings = ("$\\lambda_{\\max}$", "trace", "$R^0$", "$R^1$", "accuracy on sketch")
    return plain_table(("", *headings), lines)


def digits_table(stored: Mapping[str, Any]) -> str:
    """FAD against others after few and after many draws, with 95% intervals across targets."""
    columns = []
    for found in stored["draws"].values():
        by_place = {(a["optimizer"], a["target"], a["trial"]): a for a in found["accuracy"]}
        targets, trials = (sorted({key[i] for key in by_place}) for i in (1, 2))
        means = {
            name: [fmean(by_place[name, t, trial]["accuracy"] for trial in trials) for t in targets]
            for name in ("fad", "adam", "sgd")
        }
        column = []
        for rival in ("adam", "sgd"):
            test = scipy.stats.ttest_rel(means["fad"], means[rival])
            low, high = test.confidence_interval(0.95)
            points = fmean(means["fad"]) - fmean(means[rival])
            column.append(f"{points:+.1f} ({low:+.1f} to {high:+.1f})")
        columns.append(column)
    headings = [f"{draws} draws ({found['runs']} runs)" for draws, found in stored["draws"].items()]
    names = [f"FAD - {SHOWN[rival]}" for rival in ("adam", "sgd")]
    return plain_table(("", *headings), zip(names, *columns, strict=True))


def publish(out: Path, facts: object) -> None:
    """Write the tables, the figure and the values."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(FOLDER / "records.tar.xz") as archive:
            archive.extractall(scratch, filter="data")
        sweep = Path(scratch) / "pacs"
        found = published(sweep)
        compared = found.curvature
        assert compared is not None
        ((_, selected),) = found.variants
        pairs = all_pairs(selected.runs)
        later = all_pairs([run for run in selected.runs if run.trial in LATER])
        first = all_pairs([run for run in selected.runs if run.trial not in LATER])
        more = select_runs(with_more(selected.runs, sweep / "runs"), "train-val")
        rivals = all_pairs(more.runs, RIVALS)
        averages = across_datasets(more).rows
        averages_of = {row.row: row.cells["PACS"] for row in averages}
        (by_target,) = dataset_tables(more)
        needs = what_it_takes(pairs, selected.runs)
        ratios, of_adamw = all_ratios(compared), _of_adamw(selected.runs)
        first_trial, pairs_of_one = single(sweep / "runs"), twice(sweep / "runs")
        ablation = ablated(Path(scratch) / "ablation")
        accuracy, _, curvature, rates = tables(found)
        save_figure(methods_figure(found), out / "figure.svg")
        draw(compared, out / "spectra.svg")
        save_figure(effort_figure(averages), out / "effort.svg")
        save_figure(ablation_figure(ablation), out / "ablation.svg")
        values = {
            "environment": facts,
            "command now": COMMAND,
            **to_json(found),
            "all pairs": [plain_values(PAIRED, one) for pair in pairs for one in pair],
            "later seeds alone": [plain_values(PAIRED, one) for pair in later for one in pair],
            "first seeds alone": [plain_values(PAIRED, one) for pair in first for one in pair],
            "p after Holm": _both_ways(pairs),
            "what it takes": needs,
            "more": {
                "means": {
                    row.row.optimizer: {
                        column: cell and {"mean": cell.mean, "err": cell.err}
                        for column, cell in {**row.cells, "Avg.": averages_of[row.row]}.items()
                    }
                    for row in by_target.rows
                },
                "pairs": [plain_values(PAIRED, one) for pair in rivals for one in pair],
                "p after Holm": _both_ways(rivals),
                "learning rates": tuned(sweep),
            },
            "first trial": first_trial,
            "adamw, and adam without decay": pairs_of_one,
            "adamw with both runs": with_both(selected, pairs_of_one),
            "ablation": to_json(ablation)["results"],
            "curvature of AdamW": of_adamw.to_json()["methods"],
            "ratios": [one._asdict() for one in ratios],
            "accuracy and curvature": with_accuracy(compared),
        }
        text = json.dumps(values, indent=1).replace(f"{scratch}/", "")
        plain = {
            "home": home_table(values["results"]),
            "power": power_table(needs),
            "adamw": adamw_table(of_adamw, compared),
            "digits": digits_table(json.loads((FOLDER.parent / "digits.json").read_text())),
        }
    accuracy = replace(
        accuracy,
        title="Accuracy on the held-out domain of PACS, % (higher is better)",
        note="Mean ± standard error over six seeds. In parentheses: the paper, with ResNet-50",
    )
    shown = {
        "accuracy": accuracy,
        "landing": landing_table(accuracy),
        "pairs": pairs_grid(pairs),
        "pairs-later": pairs_grid(later),
        "more": more_grid(by_target, averages_of),
        "more-pairs": pairs_grid(rivals),
        "single": single_grid(first_trial),
        "ablation": replace(
            tables(ablation)[0],
            title="Accuracy on the held-out domain, % (higher is better)",
            note="One seed, 500 updates, untuned learning rates",
        ),
        "curvature": replace(
            curvature,
            title="Curvature of the training loss with sketch held out (lower is flatter)",
            note="Mean ± standard error over seeds 3 to 5. 96 training images, weights after "
            "update 1,000, float32. R0 and R1 within ρ = 0.05",
        ),
        "ratios": ratios_grid(ratios),
        "rates": rates_grid(rates),
    }
    for name, grid in shown.items():
        (out / f"{name}.md").write_text(to_markdown(grid))
    for name, table in plain.items():
        (out / f"{name}.md").write_text(table)
    (out / "results.json").write_text(text + "\n")


def publish_digits(sweep: Path, out: Path) -> None:
    """Write what two and what all draws of a sweep choose, and what that has on the targets."""
    runs = load_runs(sorted((sweep / "runs").iterdir())).runs
    found = {}
    for draws in (2, 20):
        selected = select_runs([run for run in runs if (run.draw or 0) < draws], "train-val")
        found[str(draws)] = {
            "runs": len(selected.runs),
            "accuracy": [
                {
                    "optimizer": place.row.optimizer,
                    "target": place.column,
                    "trial": place.trial,
                    "draw": chosen.run.draw,
                    "step": chosen.step,
                    "accuracy": 100 * chosen.accuracy,
                }
                for place, chosen in selected.chosen.items()
            ],
        }
    facts = {**environment(torch.device("cpu")), "command": read_plan(sweep).facts["commands"][0]}
    out.write_text(json.dumps({"environment": facts, "draws": found}, indent=1) + "\n")


def main() -> None:
    """Publish into the docs, or elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--digits", type=Path, help="a sweep, whose numbers go to digits.json")
    given = parser.parse_args()
    if given.digits:
        publish_digits(given.digits, FOLDER.parent / "digits.json")
        return
    stored = json.loads((FOLDER / "results.json").read_text())
    publish(given.out, stored["environment"])


if __name__ == "__main__":
    main()
