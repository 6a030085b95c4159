"""Every optimizer's default learning rate against a grid around it, by validation accuracy.

    python benchmarks/defaults.py run digits doodles --save benchmarks/defaults-cpu.json
    python benchmarks/defaults.py run pacs-resnet50-v1 --root data \
        --weights resnet50_v1_imagenet.safetensors --save benchmarks/defaults-resnet50-v1.json
    python benchmarks/defaults.py table        # writes the tables into docs/guide/defaults.md

Runs are those of an ordinary sweep with the tuned defaults (space `fair`) and other learning rates:
a sweep that was interrupted goes on, and `steppe status` shows how far it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

FACTORS = (1 / 9, 1 / 3, 1, 3, 9)
SEEDS = 3
MARGIN = 2.0
"""Points below the best of its grid that a default may be."""
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "guide" / "defaults.md"
BEGIN, END = "<!-- {name}: made by a script in benchmarks/ -->", "<!-- end of {name} -->"


@dataclass(frozen=True)
class Study:
    """A task to try learning rates on."""

    title: str
    dataset: str
    target: str
    optimizers: tuple[str, ...] = ()
    """All if empty."""
    options: dict[str, Any] = field(default_factory=dict)


_ON_PACS = {
    "optimizers": ("adam", "adamw", "sgd", "sam", "fad"),
    "options": {"steps": 201, "checkpoint_every": 200},
}
STUDIES = {
    "digits": Study("RotatedDigits, from scratch", "RotatedDigits", "75"),
    "doodles": Study("Doodles, from scratch", "Doodles", "sketch"),
    "pacs-lite0": Study("PACS, EfficientNet-Lite0, fine-tuned", "PACS", "sketch", **_ON_PACS),
    "pacs-resnet50-v1": Study("PACS, ResNet-50 v1, fine-tuned", "PACS", "sketch", **_ON_PACS),
}
BACKBONES = {"pacs-lite0": "tf_efficientnet_lite0", "pacs-resnet50-v1": "resnet50-v1"}


def grids(name: str, given: dict[str, Any]) -> Iterator[Any]:
    """One grid of a sweep for every optimizer and learning rate."""
    from steppe.optim import optimizer_names, optimizer_spec
    from steppe.sweeps import Grid

    study = STUDIES[name]
    options = {**study.options, **given}
    if name in BACKBONES:
        options["backbone"] = BACKBONES[name]
    for optimizer in study.optimizers or optimizer_names():
        default = optimizer_spec(optimizer).defaults(pretrained=name in BACKBONES)["lr"]
        for factor in FACTORS:
            yield Grid(
                (study.dataset,),
                optimizers=(optimizer,),
                trials=SEEDS,
                draws=0,
                targets=study.target,
                overrides=(f"optimizer.lr={default * factor:.4g}",),
                options=options,
                tag=f"x{factor:.3g}",
            )


def carry_out(name: str, planned: Sequence[Any], out: Path, **workers: Any) -> list[Any]:
    """Run a sweep of these grids; returns the validation accuracies of each in percent, by seed.

    A run that diverged has None.
    """
    from steppe.sweeps import Crew, Job, jobs, run_sweep, write_plan
    from steppe.training import RunDirectory, select, validation_accuracy

    sweep = write_plan(planned, out / name, command=f"benchmarks {name}", extend=True)
    run_sweep(sweep, crew=Crew(**workers))

    def value(run_name: str) -> float | None:
        run = RunDirectory(Job(sweep.folder(run_name)).result)  # there once it is done
        if not run.exists():
            return None
        return round(100 * validation_accuracy(select(run.records())), 2)

    return [[value(run_name) for run_name, _ in jobs(grid)] for grid in planned]


def run(names: Sequence[str], out: Path, given: dict[str, Any], workers: dict[str, int]) -> Any:
    """Carry studies out; returns accuracies by study, optimizer and learning rate."""
    found: dict[str, Any] = {}
    for name in names:
        planned = list(grids(name, given))
        rows = found[name] = {}
        for grid, values in zip(planned, carry_out(name, planned, out, **workers), strict=True):
            lr = grid.overrides[0].partition("=")[2]
            rows.setdefault(grid.optimizers[0], {})[lr] = values
    return found


def verdict(row: dict[str, list[float | None]]) -> tuple[str, float, float]:
    """The best learning rate of a grid, its lead over the default, and the noise of that lead.

    The noise is two standard errors of the mean of the paired differences between the seeds.
    """
    learned = {lr: v for lr, v in row.items() if None not in v}
    best = max(learned, key=lambda lr: fmean(learned[lr]))
    default = row[list(row)[FACTORS.index(1)]]  # a diverged run learned nothing
    leads = [b - (d or 0.0) for b, d in zip(learned[best], default, strict=True)]
    noise = 2 * stdev(leads) / len(leads) ** 0.5
    return best, fmean(leads), noise


def table(rows: dict[str, dict[str, list[float | None]]]) -> str:
    """The rows of a study as Markdown."""
    lines = [
        "| optimizer | default lr | 1/9 | 1/3 | **1** | 3 | 9 | best minus default |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for optimizer, row in rows.items():
        best, lead, noise = verdict(row)
        cells = []
        for lr, values in row.items():
            shown = "diverged" if None in values else f"{fmean(values):.1f}"
            cells.append(f"**{shown}**" if lr == best else shown)
        default = list(row)[FACTORS.index(1)]
        behind = "default is best" if best == default else f"{lead:.1f} ± {noise:.1f}"
        columns = [f"`{optimizer}`", f"{float(default):g}", *cells, behind]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def within(row: dict[str, list[float | None]]) -> bool:
    """Whether a default holds: within the margin of the best of its grid, or within the noise."""
    _, lead, noise = verdict(row)
    return lead <= max(MARGIN, noise)


def stored() -> dict[str, Any]:
    """All studies that have been run, by name."""
    found: dict[str, Any] = {}
    for path in sorted(HERE.glob("defaults-*.json")):
        found |= json.loads(path.read_text())["studies"]
    return {name: found[name] for name in STUDIES if name in found}


def write_tables(page: str, tables: dict[str, str]) -> str:
    """The page, with tables in the places it has for them."""
    for name, text in tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page = pattern.sub(lambda _, new=f"{begin}\n{text}\n{end}": new, page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run", help="run studies and store what they gave")
    running.add_argument("studies", nargs="+", choices=STUDIES)
    running.add_argument("--out", type=Path, default=Path("runs/defaults"))
    running.add_argument("--save", type=Path, required=True)
    running.add_argument("--root", type=Path, help="the data folder")
    running.add_argument("--weights", type=Path, help="the backbone's ImageNet weights")
    running.add_argument("--workers", type=int)
    running.add_argument("--per-gpu", type=int, default=1)
    commands.add_parser("table", help="write the tables into the docs")
    arguments = parser.parse_args()
    if arguments.command == "table":
        made = {name: table(rows) for name, rows in stored().items()}
        PAGE.write_text(write_tables(PAGE.read_text(), made))
        return
    import torch

    from steppe.bench.record import environment, write

    options = {"root": arguments.root, "weights": arguments.weights}
    given = {key: str(value) for key, value in options.items() if value is not None}
    workers = {"workers": arguments.workers, "per_gpu": arguments.per_gpu}
    found = run(arguments.studies, arguments.out, given, workers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device, "python benchmarks/defaults.py")
    write({"environment": facts, "studies": found}, arguments.save)
    for name, rows in found.items():
        print(f"{STUDIES[name].title}\n{table(rows)}")
        for optimizer, row in rows.items():
            if not within(row):
                print(f"{name}, {optimizer}: the default is worse than the best of its grid")


if __name__ == "__main__":
    main()
