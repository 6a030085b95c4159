"""Makes what the pages show of published runs from their records, which lie beside it.

    python docs/results/publish.py      # seconds; `make results`
    python docs/results/publish.py --digits sweeps/digits   # of the tutorial's sweep with 20 draws

The machine and its versions are those that the stored `results.json` names: they are of the runs,
not of whoever reads them.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from scipy.special import stdtr

from steppe.bench.record import environment
from steppe.optim import optimizer_spec
from steppe.recipes import make_order, plan
from steppe.recipes.figures import FIGURES
from steppe.recipes.results import Results, gather, grids, paired_json, to_json
from steppe.reports import (
    Cell,
    Comparison,
    Grid,
    MethodCurvature,
    Paired,
    Row,
    Run,
    Table,
    TableRow,
    across_datasets,
    compare,
    dataset_tables,
    draw,
    load_runs,
    paired,
    select_runs,
    to_markdown,
)
from steppe.reports.render import Text, cell_text
from steppe.reports.spectra import COLOURS, save_figure
from steppe.sweeps import read_plan

FOLDER = Path(__file__).parent / "pacs"
COMMAND = (
    "steppe reproduce table1 --scale small --factors 1,3,10 --root data "
    "--backbone tf_efficientnet_lite0 --weights tf_efficientnet_lite0.safetensors "
    "--set batch_size=8 --set checkpoint_every=500 --trials 6 --per-gpu 12"
)
"""What makes these runs now; they were made in two sessions, three trials in each."""
OPTIMIZERS = ("fad", "gam", "sam", "sgd", "adam")
LATER = frozenset({3, 4, 5})
"""Trials that were added when the first three had been seen; of theirs, models were measured."""
MEASURED = "sketch"
"""What the measured models hold out."""
MORE = {"adamw": "", "fad 5 %": "-ratio0.05", "fad 10 %": "-ratio0.1"}
"""What only the first three trials have: AdamW, and FAD in a part of the updates; how runs end."""
RIVALS = (  # all pairs that have one of these
    *(("adamw", name) for name in ("adam", *OPTIMIZERS[:-1])),
    *(("fad 10 %", name) for name in ("sgd", "adam", "adamw", "sam", "gam", "fad")),
    *(("fad 5 %", name) for name in ("sgd", "adam", "adamw", "sam", "gam", "fad", "fad 10 %")),
)
QUANTITIES = {"λ_max": "lambda_max", "trace": "trace", "R0": "zeroth", "R1": "first"}


def published(records: Path, scratch: Path) -> Results:
    """What the records give, as the command of `results.json` made them."""
    with tarfile.open(records) as archive:
        archive.extractall(scratch, filter="data")
    order = make_order(
        "table1",
        "small",
        changes={"factors": (1.0, 3.0, 10.0), "trials": 6},
        overrides=("batch_size=8", "checkpoint_every=500"),
        options={
            "backbone": "tf_efficientnet_lite0",
            "weights": "/weights/tf_efficientnet_lite0.safetensors",
            "root": "/data",
        },
    )
    sweep, rates = plan(order, scratch / "pacs")
    assert rates is not None, f"{records}: not all runs that tune learning rates are there"
    found = gather(order, sweep, rates)
    ((_, selected),) = found.variants
    held_out = [run for run in selected.runs if run.targets == (MEASURED,) and run.trial in LATER]
    return replace(found, curvature=compare(held_out))


def with_more(runs: Iterable[Run], folder: Path) -> list[Run]:
    """The runs of the first trials, and those of `MORE`, with the names that it has."""
    found = [run for run in runs if run.trial not in LATER]
    for name, ending in MORE.items():
        some = load_runs(sorted(folder.glob(f"*-{name.split()[0]}-none-trial?{ending}"))).runs
        assert len(some) == 4 * 3, f"{name}: {len(some)} runs"
        found += [replace(run, optimizer=name) for run in some]
    return found


def passes(name: str) -> float:
    """How often an update evaluates the gradient, on average: a plain one does once."""
    optimizer, _, share = name.removesuffix(" %").partition(" ")
    return 1 + float(share or 100) / 100 * (optimizer_spec(optimizer).passes - 1)


def more_grid(table: Table, averages: Mapping[Row, Cell | None]) -> Grid:
    """The first trials of everything, by what an update costs; the best are marked."""
    cells = {row.row: {**row.cells, "Avg.": averages[row.row]} for row in table.rows}
    columns = list(next(iter(cells.values())))
    texts = {row: {column: cell_text(own[column]) for column in own} for row, own in cells.items()}
    best = {c: max((own[c] for own in texts.values()), key=_leading) for c in columns}
    lines = []
    for row in sorted(cells, key=lambda row: (passes(row.optimizer), row.optimizer)):
        marked = [Text(text, text == best[column]) for column, text in texts[row].items()]
        lines.append((Text(row.optimizer), Text(f"{passes(row.optimizer):.3g}"), *marked))
    headings = ("method", "gradients in an update", *columns)
    note = "three seeds, the same for all; fad 5 %: FAD in 5 % of the updates, SGD in the others"
    return Grid("PACS, the first three seeds", headings, tuple(lines), 1, note)


def _leading(text: str) -> float:
    """The number that a text begins with."""
    return float(text.split()[0])


def effort_figure(rows: Iterable[TableRow]) -> Figure:
    """Accuracy against what an update costs; FAD's shares of the updates are joined."""
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axes = figure.subplots()
    joined = []
    for row in sorted(rows, key=lambda row: passes(row.row.optimizer)):
        name, cell = row.row.optimizer, row.cells["PACS"]
        assert cell is not None
        x = passes(name)
        ours = name == "sgd" or name.startswith("fad")
        joined += [(x, cell.mean)] if ours else []
        colour = COLOURS[0] if ours else COLOURS[1]
        axes.errorbar(x, cell.mean, yerr=cell.err, marker="o", color=colour, capsize=3)
        place, side = ((6, -11), "left") if ours else ((-6, 3), "right")
        axes.annotate(name, (x, cell.mean), place, textcoords="offset points", fontsize=8, ha=side)
    axes.plot(*zip(*joined, strict=True), color=COLOURS[0])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("gradients in an update, on average")
    axes.set_ylabel("accuracy, per cent")
    axes.margins(0.18, 0.1)
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


def pairs_grid(note: str, *columns: Sequence[Pair]) -> Grid:
    """A line for each pair, with its intervals; one that excludes zero is marked.

    Args:
        note: below the table.
        columns: the same pairs, from one set of seeds or another.
    """
    lines = [
        (
            Text(f"{pairs[0].targets.a} - {pairs[0].targets.b}"),
            *chain.from_iterable(map(_cells, pairs)),
        )
        for pairs in zip(*columns, strict=True)
    ]
    headings = ("points", "over targets", "over seeds") * len(columns)
    return Grid(
        "Paired differences", ("methods", *headings), tuple(lines), 1, f"95 % intervals{note}"
    )


def _both_ways(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """The corrected p-values over targets and over trials."""
    return {
        "over targets": corrected(pair.targets for pair in pairs),
        "over trials": corrected(pair.trials for pair in pairs),
    }


def _cells(pair: Pair) -> list[Text]:
    intervals = [Text(f"{one.low:+.1f} to {one.high:+.1f}", one.clear) for one in pair]
    return [Text(f"{pair.targets.difference:+.1f}"), *intervals]


def corrected(differences: Iterable[Paired]) -> dict[str, float]:
    """The p-values of their t-tests, after Holm's correction."""
    raw = {
        f"{one.a} - {one.b}": 2 * float(stdtr(one.units - 1, -abs(one.difference) / one.err))
        for one in differences
    }
    found, largest = {}, 0.0
    for number, name in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - number) * raw[name]))
        found[name] = largest
    return found


class Ratio(NamedTuple):
    """By what factor a quantity of one optimizer's models differs from another's.

    The geometric mean over pairs of the same trial, with its 95 % interval.
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
    rivals = [("fad", name) for name in OPTIMIZERS[1:]]
    rivals += [("sam", name) for name in OPTIMIZERS[1:] if name != "sam"]
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


def ratios_grid(ratios: Iterable[Ratio]) -> Grid:
    """A line for each pair of optimizers; a factor whose interval excludes one is marked."""
    by_pair: dict[str, list[Text]] = {}
    for one in ratios:
        text = f"{one.factor:.2f} ({one.low:.2f} to {one.high:.2f})"
        clear = one.high < 1 or one.low > 1
        by_pair.setdefault(f"{one.a} / {one.b}", []).append(Text(text, clear))
    lines = [(Text(names), *cells) for names, cells in by_pair.items()]
    note = "geometric means over three seeds, with 95 % intervals"
    return Grid("FAD's and SAM's models", ("methods", *QUANTITIES), tuple(lines), 1, note)


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
        for name in OPTIMIZERS
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
    """The 95 % interval of a rank correlation, by Fisher's transformation (Bonett and Wright)."""
    reach = 1.96 * np.sqrt((1 + correlation**2 / 2) / (n - 3))
    low, high = np.tanh(np.arctanh(correlation) + np.array([-reach, reach]))
    return float(low), float(high)


def publish(out: Path, facts: object) -> None:
    """Write the tables, the figure and the values."""
    with tempfile.TemporaryDirectory() as scratch:
        found = published(FOLDER / "records.tar.xz", Path(scratch))
        compared = found.curvature
        assert compared is not None
        ((_, selected),) = found.variants
        pairs = all_pairs(selected.runs)
        later = all_pairs([run for run in selected.runs if run.trial in LATER])
        first = all_pairs([run for run in selected.runs if run.trial not in LATER])
        more = select_runs(with_more(selected.runs, Path(scratch) / "pacs/runs"), "train-val")
        rivals = all_pairs(more.runs, RIVALS)
        averages = across_datasets(more).rows
        averages_of = {row.row: row.cells["PACS"] for row in averages}
        (by_target,) = dataset_tables(more)
        ratios = all_ratios(compared)
        accuracy, _, curvature, rates = grids(found)
        save_figure(FIGURES["methods"](found), out / "figure.svg")
        draw(compared, out / "spectra.svg")
        save_figure(effort_figure(averages), out / "effort.svg")
        values = {
            "environment": facts,
            "command now": COMMAND,
            **to_json(found),
            "all pairs": [paired_json(one) for pair in pairs for one in pair],
            "later seeds alone": [paired_json(one) for pair in later for one in pair],
            "first seeds alone": [paired_json(one) for pair in first for one in pair],
            "p after Holm": _both_ways(pairs),
            "more": {
                "means": {
                    row.row.optimizer: {
                        column: cell and {"mean": cell.mean, "err": cell.err}
                        for column, cell in {**row.cells, "Avg.": averages_of[row.row]}.items()
                    }
                    for row in by_target.rows
                },
                "pairs": [paired_json(one) for pair in rivals for one in pair],
                "p after Holm": _both_ways(rivals),
            },
            "ratios": [one._asdict() for one in ratios],
            "accuracy and curvature": with_accuracy(compared),
        }
        text = json.dumps(values, indent=1).replace(f"{scratch}/", "")
    shown = {
        "accuracy": accuracy,
        "pairs": pairs_grid("; on the right, the three later seeds alone", pairs, later),
        "more": more_grid(by_target, averages_of),
        "more-pairs": pairs_grid("", rivals),
        "curvature": curvature,
        "ratios": ratios_grid(ratios),
        "rates": rates,
    }
    for name, grid in shown.items():
        (out / f"{name}.md").write_text(to_markdown(grid))
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
