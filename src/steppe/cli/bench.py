"""`steppe bench`: measurements."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steppe.errors import UserError

from .common import JSON, writable

app = typer.Typer(help="Measure: every figure in the README comes from here.")


@app.callback(help="Measure: every figure in the README comes from here.")
def _end_tidily() -> None:
    """Lets a SIGTERM end a benchmark as Ctrl-C does: its folders and children go with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


_SAVE = typer.Option(
    "--save", metavar="FILE", callback=writable, help="Also store the result as JSON in FILE."
)
_IMAGES = typer.Option(
    "--images",
    metavar="DIR",
    help="A folder DOMAIN/CLASS/IMAGE, packed if it was not yet; photograph-sized images are made "
    "unless given.",
)
_OVERRIDES = typer.Option(
    "--set", metavar="KEY=VALUE", help="Any key of the config: optimizer.rho=0.1."
)
_DEVICE = typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")


@app.command("optim")
def bench_optim(
    device: Annotated[str, _DEVICE] = "auto",
    rounds: Annotated[int, typer.Option(min=2, help="Measurements of each contender.")] = 15,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time the arithmetic between gradients against its floor and against another SAM."""
    from steppe.bench import optim
    from steppe.training.processes import find_device

    result = optim.measure(find_device(device), rounds)
    _show(result, optim.tables(result), as_json, save)


@app.command("step")
def bench_step(
    device: Annotated[str, _DEVICE] = "auto",
    backbone: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "resnet18",
    batch: Annotated[
        int, typer.Option(min=2, help="Images in a step, of all domains but one.")
    ] = 24,
    optimizer: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "adam",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="Compare its step with ERM's; may be repeated; all: every algorithm."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a measurement.")] = 4,
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, fp16 or bf16.")] = "auto",
    eager: Annotated[
        bool, typer.Option("--eager", help="Without the engine: nothing compiled or captured.")
    ] = False,
    images: Annotated[Path | None, _IMAGES] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As in 'steppe train', to see what it costs.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time a step of a run, whole and in parts, beside Adam's and beside one done plainly.

    With --algorithm, compare the steps of algorithms instead.
    """
    from steppe.algorithms import algorithm_names, algorithm_spec
    from steppe.bench import step
    from steppe.training.processes import find_device

    where = find_device(device)
    if algorithm:
        if deterministic:
            raise UserError("--deterministic and --algorithm cannot be given together")
        chosen = [algorithm_spec(name).name for name in algorithm if name != "all"]
        names = algorithm_names() if "all" in algorithm else chosen
        compared = step.compare(
            where, backbone, batch, optimizer, rounds, steps, precision, names, eager, images
        )
        _show(compared, step.comparison_tables(compared), as_json, save)
        return
    result = step.measure(
        where, backbone, batch, optimizer, rounds, steps, precision, deterministic, eager, images
    )
    _show(result, step.tables(result), as_json, save)


@app.command("data")
def bench_data(
    device: Annotated[str, _DEVICE] = "auto",
    images: Annotated[Path | None, _IMAGES] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch, of all domains.")] = 96,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that read training batches; one per core else."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements.")] = 5,
    batches: Annotated[int, typer.Option(min=1, help="Batches in a measurement.")] = 4,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time reading images, from files and packed, against the disk's and the decoder's limits."""
    from steppe.bench import data
    from steppe.training.processes import find_device

    result = data.measure(find_device(device), images, batch, workers, rounds, batches)
    _show(result, data.tables(result), as_json, save)


@app.command("job")
def bench_job(
    device: Annotated[str, _DEVICE] = "auto",
    images: Annotated[Path | None, _IMAGES] = None,
    target: Annotated[
        str | None, typer.Option(help="The domain held out; the last one unless given.")
    ] = None,
    backbone: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "resnet18",
    weights: Annotated[str, typer.Option(help="none, imagenet, or a file.")] = "none",
    optimizer: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "adam",
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, fp16 or bf16.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 30,
    evaluations: Annotated[
        int | None,
        typer.Option(min=2, help="At most so many; as a run makes by itself unless given."),
    ] = None,
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="In a new process with nothing compiled, then once more."),
    ] = False,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time a whole run: its start, updates, evaluations and checkpoints."""
    from steppe.bench import job
    from steppe.training.processes import find_device

    chosen = job.Job(
        find_device(device),
        images,
        target,
        backbone,
        weights,
        optimizer,
        precision,
        steps,
        evaluations,
        tuple(overrides or ()),
    )
    result = job.cold_and_warm(chosen) if cold else job.measure(chosen)
    _show(result, job.tables(result), as_json, save)


@app.command("learning")
def bench_learning(
    images: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder DOMAIN/CLASS/IMAGE; packed if not yet.")
    ],
    device: Annotated[str, _DEVICE] = "auto",
    backbone: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "resnet18",
    weights: Annotated[str, typer.Option(help="none, imagenet, or a file.")] = "none",
    optimizer: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "fad",
    precision: Annotated[
        str, typer.Option(help="The engine's: auto, fp32, tf32, fp16 or bf16.")
    ] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Updates of a run.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of runs for each target.")] = 3,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A domain to hold out, may be repeated; each in turn unless given."),
    ] = None,
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            callback=writable,
            help="Store the result as JSON after every pair; pairs in FILE are not run again.",
        ),
    ] = None,
) -> None:
    """Compare what the engine learns with what a plain run does, in pairs with the same seeds."""
    from steppe.bench import learning
    from steppe.training.processes import find_device

    study = learning.Study(
        find_device(device),
        images,
        backbone,
        weights,
        optimizer,
        steps,
        seeds,
        tuple(target or ()),
        precision,
        tuple(overrides or ()),
    )
    result = learning.measure(study, save)
    _show(result, learning.tables(result), as_json, save)


@app.command("fidelity")
def bench_fidelity(
    device: Annotated[str, _DEVICE] = "auto",
    backbone: Annotated[
        str, typer.Option(help="small-cnn, or any that 'steppe train' knows.")
    ] = "small-cnn",
    weights: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Pretrained, as safetensors.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="A folder DOMAIN/CLASS/IMAGE to train on; built-in digits otherwise."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps before the measurement.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 96,
    batches: Annotated[int, typer.Option(min=1, help="Batches to average over.")] = 8,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Compare FAD's differences of gradients in each precision with float64."""
    from steppe.bench import fidelity
    from steppe.bench.task import prepare
    from steppe.training.processes import find_device

    where = find_device(device)
    task = prepare(where, backbone, weights, images, steps, batch, batches)
    result = fidelity.measure(task, fidelity.radii())
    _show(result, fidelity.tables(result), as_json, save)


@app.command("curvature")
def bench_curvature(
    device: Annotated[str, _DEVICE] = "auto",
    backbone: Annotated[
        str, typer.Option(help="small-cnn, or any that 'steppe train' knows.")
    ] = "small-cnn",
    steps: Annotated[int, typer.Option(min=0, help="Training steps before the measurement.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    batches: Annotated[int, typer.Option(min=1, help="Batches the loss is the mean of.")] = 1,
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all solvers.")] = 3,
    rival: Annotated[
        list[str] | None,
        typer.Option(help="eigsh (with curvlinops), pyhessian, or none; both unless given."),
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds after which eigsh is stopped; its time is then more.")
    ] = float("inf"),
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time the top eigenvalues of a Hessian against other tools, to the same residual."""
    from steppe.bench import curvature
    from steppe.training.processes import find_device

    rivals = curvature.RIVALS if rival is None else [name for name in rival if name != "none"]
    curvature.check_options(rivals, limit)
    task = curvature.prepare(find_device(device), backbone, steps, batch, batches)
    result = curvature.measure(task, top, rounds, rivals, limit)
    _show(result, curvature.tables(result), as_json, save)


@app.command("sweep")
def bench_sweep(
    runs: Annotated[int, typer.Option(min=6, help="Runs in the sweep.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 40,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time what a sweep adds to its runs: launcher, worker, claims, commits."""
    from steppe.bench import sweeps

    result = sweeps.sweep_overhead(runs, steps)
    _show(result, sweeps.tables(result), as_json, save)


@app.command("report")
def bench_report(
    runs: Annotated[int, typer.Option(min=1, help="Runs, made up.")] = 10_000,
    records: Annotated[int, typer.Option(min=1, help="Records of each.")] = 17,
    as_json: Annotated[bool, JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time a report over many runs, and its memory."""
    from steppe.bench import sweeps

    result = sweeps.report_speed(runs, records)
    _show(result, sweeps.tables(result), as_json, save)


def _show(result: dict[str, Any], tables: list[Any], as_json: bool, save: Path | None) -> None:
    if save is not None:
        from steppe.bench import record

        record.write(result, save)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(*tables, sep="\n")
