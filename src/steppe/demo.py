"""`steppe demo`: the whole story on built-in data, in minutes on a laptop CPU.

Every optimizer trains on all domains of a dataset but one and is tested on that one, for every
domain in turn: the protocol of the paper's tables, as ordinary runs in a folder.
"""

from __future__ import annotations

import base64
import html
import io
import logging
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steppe import __version__
from steppe.domains import DatasetSpec, dataset_spec
from steppe.domains.pool import cores, start_worker
from steppe.durable import replace
from steppe.optim import optimizer_spec
from steppe.training import make_config, select, train

DATASET = "Doodles"
STEPS = 201
BATCH = 16
SEEDS = 2
# Learning rates for a small network that starts from nothing; the same steps, seeds and batches for
# all, and nothing chosen by looking at a held-out domain.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {"lr": 2e-3},
    "sgd": {"lr": 0.05},
    "sam": {"lr": 0.05, "rho": 0.1},
    "gam": {"lr": 0.05, "rho": 0.1, "alpha": 0.5},
    "fad": {"lr": 0.05, "rho": 0.1, "alpha": 0.5, "beta": 0.5},
}
NOTE = (
    "Accuracy on the domain held out, in percent, at the step with the best validation accuracy on "
    "the others: mean ± standard error over {seeds} seeds, so few that the error itself is rough. "
    "Times are of one thread, with as many runs side by side as there are cores. One small task "
    "decides nothing about the methods; it shows that they run, what they cost, and what a table "
    "looks like."
)


@dataclass(frozen=True)
class Job:
    """One run of the demo."""

    optimizer: str
    target: str
    seed: int
    folder: Path

    def config(self, dataset: str, steps: int) -> dict[str, Any]:
        """What is given to `make_config`."""
        return {
            "dataset": dataset,
            "targets": [self.target],
            "optimizer": {"name": self.optimizer, **OPTIMIZERS[self.optimizer]},
            "seed": self.seed,
            "trial_seed": self.seed,
            "steps": steps,
            "batch_size": BATCH,
            "checkpoint_every": 50,
            "device": "cpu",
        }


@dataclass(frozen=True)
class Result:
    """What the table needs of a run: accuracy in percent, time of a step in milliseconds."""

    job: Job
    accuracy: float
    milliseconds: float


def run(out: Path, dataset: str = DATASET, steps: int = STEPS, seeds: int = SEEDS) -> Path:
    """Trains every optimizer for every target and seed, prints the table and writes the report.

    Args:
        out: the folder for the runs; runs that are done there are not repeated.
        dataset: the dataset.
        steps: updates of each run.
        seeds: runs of each cell.

    Returns:
        The report's path.
    """
    console = Console()
    spec = dataset_spec(dataset)
    targets = [name for names in spec.targets for name in names]
    jobs = [
        Job(optimizer, target, seed, out / f"{optimizer}-{target}-{seed}")
        for seed in range(seeds)
        for target in targets
        for optimizer in OPTIMIZERS
    ]
    console.print(
        f"{spec.name}: {len(targets)} domains, {spec.n_classes} classes. Each domain is held out "
        f"in turn; {len(OPTIMIZERS)} optimizers, {seeds} seeds, {steps} steps: {len(jobs)} runs."
    )
    began = time.monotonic()
    results = list(_progress(_work(jobs, spec.name, steps), len(jobs), console))
    console.print(table(spec, targets, results))
    console.print(NOTE.format(seeds=seeds))
    path = out / "report.html"
    replace(path, _report(spec, targets, results, steps, seeds).encode())
    console.print(
        f"{len(jobs)} runs in {time.monotonic() - began:.0f} s, in {out}", highlight=False
    )
    console.print(f"report: {path.resolve()}", highlight=False, soft_wrap=True)
    return path


def _work(jobs: Sequence[Job], dataset: str, steps: int) -> Iterator[Result]:
    """The runs' results, as they come in: one process a core, one thread a process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores(), context, initializer=_start) as pool:
        given = [(job, dataset, steps) for job in jobs]
        yield from pool.map(_train, *zip(*given, strict=True))


def _start() -> None:
    start_worker()
    torch.set_num_threads(1)
    logging.getLogger("steppe").setLevel(logging.ERROR)


def _train(job: Job, dataset: str, steps: int) -> Result:
    records = train(make_config(job.config(dataset, steps)), job.folder, resume=True)
    accuracy = 100 * select(records)["domains"][job.target]["test"]["accuracy"]
    # The median, because one disturbance of the machine would show in a mean; the first record is
    # of one step, which pays for torch's set-up.
    seconds = statistics.median(r["seconds_per_step"] for r in records[1:] or records)
    return Result(job, accuracy, 1e3 * seconds)


def _progress(results: Iterable[Result], total: int, console: Console) -> Iterator[Result]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=total)
        for number, result in enumerate(results, start=1):
            progress.advance(task)
            if not console.is_terminal and number % len(OPTIMIZERS) == 0:
                left = (time.monotonic() - began) / number * (total - number)
                left_text = timedelta(seconds=round(left))
                console.print(f"{number} of {total} runs, {left_text} left", highlight=False)
            yield result


def rows(targets: Sequence[str], results: Sequence[Result]) -> dict[str, list[str]]:
    """The cells of the table by optimizer: targets, average, passes, time of a step."""
    times = {
        name: statistics.median(r.milliseconds for r in results if r.job.optimizer == name)
        for name in OPTIMIZERS
    }
    cells = {}
    for name in OPTIMIZERS:
        own = [r for r in results if r.job.optimizer == name]
        by_target = [[r.accuracy for r in own if r.job.target == target] for target in targets]
        by_seed = [statistics.mean(column) for column in zip(*by_target, strict=True)]
        cells[name] = [
            *map(_cell, [*by_target, by_seed]),
            str(optimizer_spec(name).passes),
            f"{times[name]:.1f}",
        ]
    return cells


def _cell(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    # DomainBed's error: the standard deviation of the population, over the root of n.
    return f"{mean:.1f} ± {statistics.pstdev(values) / len(values) ** 0.5:.1f}"


def _headings(spec: DatasetSpec, targets: Sequence[str]) -> list[str]:
    labels = [spec.label(target) for target in targets]
    return ["optimizer", *labels, "Avg.", "passes", "ms/step"]


def table(spec: DatasetSpec, targets: Sequence[str], results: Sequence[Result]) -> Table:
    """The results for the terminal."""
    grid = Table(
        title=f"{spec.name}: accuracy on the domain held out",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in _headings(spec, targets):
        justify: Literal["left", "right"] = "left" if heading == "optimizer" else "right"
        grid.add_column(heading, justify=justify, no_wrap=True)
    for name, cells in rows(targets, results).items():
        grid.add_row(name, *(cell.replace(" ", "") for cell in cells))  # to fit 80 columns
    return grid


def _report(
    spec: DatasetSpec, targets: Sequence[str], results: Sequence[Result], steps: int, seeds: int
) -> str:
    """The table and two figures, as one page that needs nothing else."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in _headings(spec, targets))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in (name, *cells)) + "</tr>"
        for name, cells in rows(targets, results).items()
    )
    figures = _figures(spec, targets, results)
    pictures = "".join(
        f'<figure><img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
        for title, data in figures.items()
    )
    return _PAGE.format(
        title=f"steppe demo: {spec.name}",
        about=f"{len(OPTIMIZERS)} optimizers, {seeds} seeds, {steps} steps, steppe {__version__}, "
        f"torch {torch.__version__}",
        head=head,
        body=body,
        note=NOTE.format(seeds=seeds),
        figures=pictures,
    )


def _figures(
    spec: DatasetSpec, targets: Sequence[str], results: Sequence[Result]
) -> Mapping[str, str]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    from steppe.domains import load

    def encoded(figure: Any) -> str:
        file = io.BytesIO()
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True)
        plt.close(figure)
        return base64.b64encode(file.getvalue()).decode()

    figure, axes = plt.subplots(figsize=(5, 3.2))
    for name in OPTIMIZERS:
        own = [r for r in results if r.job.optimizer == name]
        x = statistics.median(r.milliseconds for r in own)
        y = statistics.mean(r.accuracy for r in own)
        axes.scatter(x, y, color="#00897b")
        axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", color="#888")
    axes.margins(0.15)
    axes.set_xlabel("milliseconds per step")
    axes.set_ylabel("mean accuracy on held-out domains, %")
    _grey(axes)
    cost = encoded(figure)

    dataset = load(spec.name)
    figure, grid = plt.subplots(len(targets), 8, figsize=(5, 0.85 * len(targets)))
    figure.subplots_adjust(hspace=0.5)
    for line, domain in zip(grid, dataset.domains, strict=True):
        for i, axes in enumerate(line):
            pixels = domain.images[i]
            axes.imshow(pixels.squeeze(), cmap="gray" if pixels.shape[2] == 1 else None)
            axes.axis("off")
        line[0].set_title(spec.label(domain.name), fontsize=8, loc="left", color="#888")
    return {"Accuracy against cost": cost, "The domains": encoded(figure)}


def _grey(axes: Any) -> None:
    """Ink that can be read on a light page and on a dark one."""
    axes.tick_params(colors="#888")
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color("#888")
    for spine in axes.spines.values():
        spine.set_color("#888")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .6rem; text-align: right; white-space: nowrap; }}
th, td {{ border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 2rem 0; }}
figcaption, .about {{ color: color-mix(in srgb, currentColor 65%, transparent); }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{about}</p>
<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>{note}</p>
{figures}
</body>
</html>
"""
