"""Default learning rates and FAD's radius against grids around them, by validation accuracy.

Runs are those of an ordinary sweep with the tuned defaults (space `fair`) and other values: a sweep
that was interrupted goes on, and `steppe sweep status` shows how far it is. --tables writes the
tables of the stored results into docs/guide/defaults.md.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from harness import Result, command, facts, option
from runs import SweepOptions, carry_out

from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec
from steppe.sweeps import Grid
from steppe.training import RunDirectory, select, validation_accuracy

FACTORS = (1 / 9, 1 / 3, 1, 3, 9)
"""Of the default learning rate; those about the radius have the middle three."""
RHO, BATCHES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), (8, 32)
SEEDS = 3
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "guide" / "defaults.md"
BEGIN, END = "<!-- {name}: made by a script in benchmarks/ -->", "<!-- end of {name} -->"

Row = dict[str, list[float | None]]
"""Validation accuracies in percent by learning rate, one for each seed; None: it diverged."""


@dataclass(frozen=True)
class Study:
    """A task: from scratch, unless there is a backbone to be fine-tuned."""

    dataset: str
    target: str
    backbone: str = ""
    optimizers: tuple[str, ...] = ()
    """Those whose learning rates are tried, all if empty; none of it where FAD's radius is."""
    radius: bool = False

    def settings(self) -> Iterator[tuple[tuple[str, ...], str, str, tuple[str, ...], str]]:
        """For every cell: its row, the optimizer, the learning rate, other overrides, a tag."""
        for optimizer in ("fad",) if self.radius else self.optimizers or optimizer_names():
            default = optimizer_spec(optimizer).defaults(pretrained=bool(self.backbone))["lr"]
            rates = [default * factor for factor in (FACTORS[1:4] if self.radius else FACTORS)]
            if self.radius:
                for batch, rho, lr in product(BATCHES, RHO, rates):
                    overrides = (f"optimizer.rho={rho:g}", f"batch_size={batch}")
                    tag = f"b{batch}-rho{rho:g}-lr{lr:.3g}"
                    yield (str(batch), f"{rho:g}"), optimizer, f"{lr:.3g}", overrides, tag
            else:
                for factor, lr in zip(FACTORS, rates, strict=True):
                    yield (optimizer,), optimizer, f"{lr:.4g}", (), f"x{factor:.3g}"


FEW = ("adam", "adamw", "sgd", "sam", "fad")
STUDIES = {
    "digits": Study("RotatedDigits", "75"),
    "doodles": Study("Doodles", "sketch"),
    "pacs-lite0": Study("PACS", "sketch", "tf_efficientnet_lite0", FEW),
    "pacs-resnet50-v1": Study("PACS", "sketch", "resnet50-v1", FEW),
    "radius-digits": Study("RotatedDigits", "75", radius=True),
    "radius-doodles": Study("Doodles", "sketch", radius=True),
}


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    study: list[str] | None = option(None, f"May be repeated: {', '.join(STUDIES)}.")
    root: Path | None = option(None, "The data folder.")
    weights: Path | None = option(None, "The backbone's ImageNet weights.")
    tables: bool = option(False, "Write the stored tables into the docs.", "--tables")


def measure(options: Options) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.study or ():
        if name not in STUDIES:
            raise UserError(unknown("study", name, STUDIES))
    if options.tables:
        made = {name: table(found) for name, found in stored().items()}
        PAGE.write_text(write_tables(PAGE.read_text(), made))
    studies = {name: run(name, options) for name in options.study or ()}
    return {"environment": facts(device), "studies": studies}


def run(name: str, options: Options) -> dict[str, Any]:
    """Accuracies by row and learning rate."""
    study = STUDIES[name]
    given = {"root": options.root, "weights": options.weights}
    config: dict[str, Any] = {key: str(value) for key, value in given.items() if value}
    if study.backbone:
        config |= {"backbone": study.backbone, "steps": 201, "checkpoint_every": 200}
    settings = list(study.settings())
    planned = [
        Grid(
            (study.dataset,),
            optimizers=(optimizer,),
            trials=SEEDS,
            draws=0,
            targets=study.target,
            overrides=(f"optimizer.lr={lr}", *overrides),
            options=config,
            tag=tag,
        )
        for _, optimizer, lr, overrides, tag in settings
    ]
    found: dict[str, Any] = {}
    for (row, _, lr, _, _), runs in zip(settings, carry_out(name, planned, options), strict=True):
        rates = found
        for key in row:
            rates = rates.setdefault(key, {})
        rates[lr] = accuracies(runs)
    return found


def accuracies(runs: Sequence[RunDirectory | None]) -> list[float | None]:
    best = [None if run is None else validation_accuracy(select(run.records())) for run in runs]
    return [None if value is None else round(100 * value, 2) for value in best]


def verdict(row: Row) -> tuple[str, float, float]:
    """The best learning rate of a grid, its lead over the default, and the noise of that lead.

    The noise is two standard errors of the mean of the paired differences between the seeds.
    """
    learned: dict[str, Any] = {lr: values for lr, values in row.items() if None not in values}
    best = max(learned, key=lambda lr: fmean(learned[lr]))
    default = row[list(row)[FACTORS.index(1)]]  # a diverged run learned nothing
    leads = [b - (d or 0.0) for b, d in zip(learned[best], default, strict=True)]
    return best, fmean(leads), 2 * stdev(leads) / len(leads) ** 0.5


def table(found: dict[str, Any]) -> str:
    """A study as Markdown: with a verdict where default learning rates are tried."""
    of_radius = "8" in found
    if of_radius:
        rows = {f"{b} | {r}": row for b, rhos in found.items() for r, row in rhos.items()}
        headings = ["images per domain", "rho", *(f"lr {lr}" for lr in next(iter(rows.values())))]
    else:
        rows = found
        headings = ["optimizer", "default lr", "1/9", "1/3", "**1**", "3", "9"]
        headings.append("best minus default")
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for name, row in rows.items():
        cells = {lr: "diverged" if None in v else f"{fmean(v):.1f}" for lr, v in row.items()}
        columns = [name]
        if not of_radius:
            best, lead, noise = verdict(row)
            cells[best] = f"**{cells[best]}**"
            default = list(row)[FACTORS.index(1)]
            cells["verdict"] = f"{lead:.1f} ± {noise:.1f}" if best != default else "default is best"
            columns = [f"`{name}`", f"{float(default):g}"]
        lines.append(f"| {' | '.join([*columns, *cells.values()])} |")
    return "\n".join(lines) + "\n"


def stored() -> dict[str, Any]:
    """All studies that have been run, by name."""
    found: dict[str, Any] = {}
    for path in sorted(HERE.glob("defaults-*.json")):
        found |= json.loads(path.read_text())["studies"]
    radius = json.loads((HERE / "radius-cpu.json").read_text())["studies"]
    found |= {f"radius-{name}": study for name, study in radius.items()}
    return {name: found[name] for name in STUDIES if name in found}


def write_tables(page: str, tables: dict[str, str]) -> str:
    """The page, with tables in the places it has for them."""
    for name, text in tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, _, rest = page.partition(begin)
        if rest:
            page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def markdown(result: Result) -> list[str]:
    return [f"{name}\n{table(found)}" for name, found in result["studies"].items()]


main = command(Options, measure, markdown)
if __name__ == "__main__":
    main()
