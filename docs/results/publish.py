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
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import torch

from steppe.bench.record import environment
from steppe.recipes import make_order, plan
from steppe.recipes.figures import FIGURES
from steppe.recipes.results import Results, gather, grids, paired_json, to_json
from steppe.reports import Grid, Paired, load_runs, paired, select_runs, to_markdown
from steppe.reports.render import Text
from steppe.reports.spectra import save_figure
from steppe.sweeps import read_plan

FOLDER = Path(__file__).parent / "pacs"
COMMAND = (
    "steppe reproduce table1 --scale small --factors 1,3,10 --root data "
    "--backbone tf_efficientnet_lite0 --weights tf_efficientnet_lite0.safetensors "
    "--set batch_size=8 --set checkpoint_every=500 --per-gpu 12"
)
"""What makes these runs now; when they were made, these factors were the scale's own."""
OPTIMIZERS = ("fad", "gam", "sam", "sgd", "adam")


def published(records: Path, scratch: Path) -> Results:
    """What the records give, as the command of `results.json` made them."""
    with tarfile.open(records) as archive:
        archive.extractall(scratch, filter="data")
    order = make_order(
        "table1",
        "small",
        changes={"factors": (1.0, 3.0, 10.0)},
        overrides=("batch_size=8", "checkpoint_every=500"),
        options={
            "backbone": "tf_efficientnet_lite0",
            "weights": "/weights/tf_efficientnet_lite0.safetensors",
            "root": "/data",
        },
    )
    sweep, rates = plan(order, scratch / "pacs")
    assert rates is not None, f"{records}: not all runs that tune learning rates are there"
    return gather(order, sweep, rates)


def all_pairs(found: Results) -> list[tuple[Paired, Paired]]:
    """Every optimizer against every other, over targets and over trials."""
    ((_, selected),) = found.variants
    return [
        (paired(selected, a, b), paired(selected, a, b, over="trials"))
        for a, b in combinations(OPTIMIZERS, 2)
    ]


def pairs_grid(pairs: Iterable[tuple[Paired, Paired]]) -> Grid:
    """A line for each pair, with both intervals; one that excludes zero is marked."""
    lines = [
        (
            Text(f"{one.a} - {one.b}"),
            Text(f"{one.difference:+.1f}"),
            *(Text(f"{p.low:+.1f} to {p.high:+.1f}", p.clear) for p in (one, two)),
        )
        for one, two in pairs
    ]
    headings = ("methods", "points", "95 %, over the targets", "95 %, over the seeds")
    return Grid("Paired differences", headings, tuple(lines), 1)


def publish(out: Path, facts: object) -> None:
    """Write the tables, the figure and the values."""
    with tempfile.TemporaryDirectory() as scratch:
        found = published(FOLDER / "records.tar.xz", Path(scratch))
        pairs = all_pairs(found)
        accuracy, _, rates = grids(found)
        save_figure(FIGURES["methods"](found), out / "figure.svg")
    for name, grid in (("accuracy", accuracy), ("pairs", pairs_grid(pairs)), ("rates", rates)):
        (out / f"{name}.md").write_text(to_markdown(grid))
    values = {
        "environment": facts,
        "command now": COMMAND,
        **to_json(found),
        "all pairs": [paired_json(one) for pair in pairs for one in pair],
    }
    (out / "results.json").write_text(json.dumps(values, indent=1) + "\n")


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
