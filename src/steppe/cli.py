"""The command line: parses, calls, prints; no logic.

Exit codes: 0 success; 1 a run that failed, data with problems, a missing extra, or a bug; 2 a
user's mistake; 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

import json
import logging
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from steppe import __version__
from steppe.errors import Interrupted, RunError, UserError

# Import name -> extra; everything else comes with `bench`.
_EXTRAS = {
    "curvlinops": "dev",
    "mlflow": "loggers",
    "pyhessian": "dev",
    "ray": "ray",
    "tensorboard": "loggers",
    "wandb": "loggers",
}


def _missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "a package").partition(".")[0]
    extra = _EXTRAS.get(package, "bench")
    return f"steppe: this command needs {package}: pip install 'steppe[{extra}]'"


try:
    import rich  # noqa: F401  (typer runs without it, the commands do not)
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as error:  # a plain `pip install steppe` brings torch and nothing else
    raise SystemExit(_missing(error)) from None

app = typer.Typer(
    help="Flatness-aware optimizers and a domain-generalization benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug is reported with a traceback that can be pasted
)
data_app = typer.Typer(help="Datasets: what is known, fetching, checking, packing.")
app.add_typer(data_app, name="data", no_args_is_help=True)
sweep_app = typer.Typer(help="Sweeps: many runs, on one machine or a cluster.")
app.add_typer(sweep_app, name="sweep", no_args_is_help=True)
import_app = typer.Typer(help="Results of other programs.")
app.add_typer(import_app, name="import", no_args_is_help=True)


class _MeasuresUnlessTold(TyperGroup):
    """`curvature RUN` is `curvature measure RUN`; a run called compare is ./compare."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


curvature_app = typer.Typer(
    cls=_MeasuresUnlessTold,
    help="Measure how flat a run's minimum is: 'steppe curvature RUN' (the options: 'steppe "
    "curvature measure --help'); then compare runs.",
)
app.add_typer(curvature_app, name="curvature", no_args_is_help=True)
bench_app = typer.Typer(help="Measure: every figure in the README comes from here.")
app.add_typer(bench_app, name="bench", no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"steppe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep the runs here; a temporary folder else."),
    ] = None,
) -> None:
    """Compare the optimizers on built-in data, each domain held out in turn: minutes on a CPU."""
    from steppe.demo import run

    run(out or Path(tempfile.mkdtemp(prefix="steppe-demo-")))


_JSON = typer.Option("--json", help="Print the result as JSON, for programs.")
Which = Literal["last", "best"]
_ROOT = typer.Option("--root", metavar="DIR", help="The data folder: $STEPPE_DATA or ./data.")
_PLUGINS = typer.Option(
    "--plugin", help="A module that registers datasets or algorithms of your own."
)
_RUN = typer.Argument(metavar="RUN", help="The folder of a run.")
_WHICH = typer.Option("--which", help="The weights after the last step, or those validated best.")


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run's folder.")],
    dataset: Annotated[
        str | None,
        typer.Option(help="A name ('steppe data list'), or a folder DOMAIN/CLASS/IMAGE."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="A domain to hold out; may be repeated.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="A domain to train on; all others unless given.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="How domains become a loss: ERM, IRM, VREx, GroupDRO, Mixup, MLDG, MMD, CORAL, "
            "DANN, CDANN, MTL, SagNet, ARM, RSC, MixStyle, MIRO or Fishr."
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="How the loss is minimized: adam, adamw, sgd, yogi, adabelief, adahessian, sam, "
            "gam, gam-exact, gam-release or fad."
        ),
    ] = None,
    averaging: Annotated[
        str | None, typer.Option(help="How weights are averaged: none, swad or sma.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="resnet18, resnet50, or any name in timm.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="imagenet, none, or a safetensors or checkpoint file.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="domainbed, or the paper's appendix.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32, fp16 or bf16.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates; the dataset's unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches and augmentation.")] = None,
    trial_seed: Annotated[int | None, typer.Option(help="Of the split, as in DomainBed.")] = None,
    draw: Annotated[
        int | None,
        typer.Option(metavar="N", help="Draw hyper-parameters as DomainBed's hparams_seed N."),
    ] = None,
    space: Annotated[
        str | None, typer.Option(help="What --draw draws from: domainbed (default), fad or fair.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A config.json to start from.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any key of the config: optimizer.rho=0.1."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    root: Annotated[Path | None, _ROOT] = None,
    logger: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; may be repeated.")
    ] = None,
    plugin: Annotated[list[str] | None, _PLUGINS] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits again on a GPU, at some cost.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run in DIR was interrupted.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the selected record as JSON, for programs.")
    ] = False,
) -> None:
    """Train one model: some domains held out, the others trained on.

    Several GPUs or processes: torchrun --nproc-per-node N -m steppe train ...
    """
    from steppe import training
    from steppe.training.progress import display, summary

    given = {
        "dataset": dataset,
        "targets": target,
        "sources": source,
        "algorithm": algorithm,
        "optimizer": optimizer,
        "averaging": averaging,
        "backbone": backbone,
        "weights": weights,
        "split": split,
        "precision": precision,
        "steps": steps,
        "seed": seed,
        "trial_seed": trial_seed,
        "device": device,
        "root": str(root) if root else None,
        "loggers": logger,
        "plugins": plugin,
        "deterministic": deterministic or None,
    }
    options = {key: value for key, value in given.items() if value is not None}
    run = training.RunDirectory(out)
    if resume and not run.exists() and not options and config is None:
        raise UserError(f"{out} is not a run: nothing to resume")
    resumed = run.config() if resume and run.exists() else None
    chosen = training.configure(
        options, overrides or [], file=config, resumed=resumed, draw=draw, space=space
    )
    console = _talk()
    records = training.train(chosen, out, resume=resume, display=display(console))
    if os.environ.get("RANK", "0") != "0":  # one of several processes, and not the one that talks
        return
    best = training.select(records)
    if as_json:
        print(json.dumps(best))
    else:
        validated = training.validation_accuracy(best) is not None
        title = "best by validation" if validated else "last (no validation images)"
        if best.get("averaged") and not records[0].get("averaged"):
            title = "the average"  # made at the end, of what the other records are of
        print(f"{title}: {summary(best)}")
        console.print(f"{out}: done", highlight=False)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Also sum the logits of all runs: with sma, EoA.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A folder DOMAIN/CLASS/IMAGE or CLASS/IMAGE, or a dataset's name; the run's own "
            "target domains unless given.",
        ),
    ] = None,
    which: Annotated[Which, _WHICH] = "last",
    root: Annotated[Path | None, _ROOT] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Evaluate a run's model, or an ensemble of several, on every image of some domains."""
    from rich.console import Console

    from steppe.training import evaluate_ensemble, evaluate_run
    from steppe.training.progress import ensemble_table, score_table

    home = str(root) if root else None
    if ensemble:
        found = evaluate_ensemble(runs, data, which=which, device=device, root=home)
        names = [str(run) for run in runs]
        if as_json:
            print(json.dumps({d: value.to_json(names) for d, value in found.items()}, indent=2))
        else:
            Console().print(ensemble_table(found, names, f"{which} weights, all images"))
        return
    if len(runs) > 1:
        raise UserError(f"{len(runs)} runs were given: add --ensemble, or evaluate one at a time")
    scores = evaluate_run(runs[0], data, which=which, device=device, root=home)
    if as_json:
        print(json.dumps({domain: value.to_json() for domain, value in scores.items()}, indent=2))
    else:
        title = f"{runs[0].name}: {which} weights, all images"
        Console().print(score_table(scores, title))


@app.command()
def export(
    run: Annotated[Path, _RUN],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file to write.")],
    which: Annotated[Which, _WHICH] = "last",
) -> None:
    """Write a run's network as one safetensors file that timm or torchvision can load."""
    from steppe.training import export_run

    facts = export_run(run, out, which)
    print(f"{out}: {facts['backbone']}, {len(json.loads(facts['classes']))} classes")


def _writable(path: Path | None) -> Path | None:
    """Finds out before the measurement, not after it, whether its result can be stored."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    return path


_DOMAIN = typer.Option(
    "--domain",
    metavar="NAME",
    help="A domain to measure on, may be repeated; those the run was trained on unless given.",
)


@curvature_app.command("measure")
def curvature_measure(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    domain: Annotated[list[str] | None, _DOMAIN] = None,
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues, the largest first.")] = 50,
    images: Annotated[
        int, typer.Option(min=0, help="Drawn evenly from the domains; 0: all of them.")
    ] = 1024,
    which: Annotated[Which, _WHICH] = "last",
    rho: Annotated[
        float | None,
        typer.Option(help="The radius of R0, R1 and R_FAD; the optimizer's own or 0.05 else."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="The share of R0 in R_FAD; FAD's own or 0.5 else.")
    ] = None,
    tol: Annotated[
        float, typer.Option(help="Residual to reach, relative to the largest eigenvalue.")
    ] = 1e-3,
    trace_rtol: Annotated[
        float, typer.Option(help="Standard error of the trace to reach, relative to it.")
    ] = 0.02,
    density: Annotated[
        bool, typer.Option("--density", help="Also estimate how all eigenvalues are spread.")
    ] = False,
    precision: Annotated[
        Literal["float32", "float64"], typer.Option(help="Of the computation.")
    ] = "float32",
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images in a batch, 64 if they are large: fewer need less memory."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    root: Annotated[Path | None, _ROOT] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the images drawn and the random vectors.")
    ] = 0,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Measure a run's loss around its weights: eigenvalues and trace of the Hessian, flatness.

    The result goes to RUN/curvature/NAME.json and is shown by 'steppe report RUN --format html'.
    With --json, a line for each run.
    """
    from rich.console import Console

    from steppe.reports import curvature
    from steppe.training import measure_run
    from steppe.training.curvature import run_folder
    from steppe.training.measured import measurement_file
    from steppe.training.phases import Shown

    for run in runs:
        with Shown(_talk(), f"curvature of {run}") as shown:
            measured = measure_run(
                run,
                domains=domain,
                top=top,
                images=images,
                which=which,
                rho=rho,
                alpha=alpha,
                tol=tol,
                trace_rtol=trace_rtol,
                batch_size=batch_size,
                density=density,
                seed=seed,
                device=device,
                root=str(root) if root else None,
                precision=precision,
                progress=shown,
            )
        if as_json:
            print(json.dumps(measured.to_json()))
            continue
        Console().print(curvature.measured_table(measured))
        for remark in curvature.remarks(measured):
            print(f"note: {remark}")
        where = measurement_file(run_folder(run), measured.name)
        print(f"{where}: written after {measured.seconds:.0f} s")


@curvature_app.command("compare")
def curvature_compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Runs, sweeps, or folders of runs.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", callback=_writable, help="The figure: .svg, .png or .pdf."
        ),
    ] = Path("curvature.svg"),
    domain: Annotated[list[str] | None, _DOMAIN] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help="Only runs that hold out exactly this target, may be repeated; all unless given.",
        ),
    ] = None,
    which: Annotated[Which, _WHICH] = "last",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Draw the spectra of measured runs by method, their largest eigenvalues and traces."""
    from rich.console import Console

    from steppe.reports import curvature, load_runs, spectra

    spectra.check_format(out)
    loaded = load_runs(paths)
    compared = curvature.compare(loaded.runs, domain, which, target)
    spectra.draw(compared, out)
    print(f"{out}: drawn", file=sys.stderr)
    if as_json:
        print(json.dumps(compared.to_json(), indent=2))
    else:
        Console().print(curvature.comparison_table(compared))
    for note in compared.notes:
        print(f"note: {note}", file=sys.stderr)
    for problem in loaded.problems:
        print(f"steppe: {problem}", file=sys.stderr)


_SWEEP = typer.Argument(metavar="DIR", help="The sweep's folder.")
_STALE = typer.Option(
    "--stale", min=1, help="Seconds of silence after which a worker is taken for dead."
)
_THREADS = typer.Option("--threads", min=1, help="Threads of each worker, on a CPU.")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@sweep_app.command("plan")
def sweep_plan(
    path: Annotated[Path, _SWEEP],
    datasets: Annotated[str, typer.Option(help="Names or folders, with commas.")],
    algorithms: Annotated[str, typer.Option(help="Names, with commas.")] = "ERM",
    optimizers: Annotated[str, typer.Option(help="Names, with commas.")] = "adam",
    averaging: Annotated[str, typer.Option(help="Names, with commas.")] = "none",
    trials: Annotated[int, typer.Option(min=1, help="Seeds of the split.")] = 3,
    draws: Annotated[
        int, typer.Option(min=1, help="Hyper-parameters; the first are the defaults.")
    ] = 20,
    targets: Annotated[
        Literal["single", "pairs"],
        typer.Option(help="Also hold out pairs, for leave-one-domain-out selection."),
    ] = "single",
    space: Annotated[str, typer.Option(help="What is drawn from: domainbed, fad or fair.")] = (
        "domainbed"
    ),
    steps: Annotated[int | None, typer.Option(help="Updates; the dataset's unless given.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="resnet18, resnet50, or any name in timm.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="imagenet, none, or a safetensors or checkpoint file.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of every run's config."),
    ] = None,
    root: Annotated[Path | None, _ROOT] = None,
    plugin: Annotated[list[str] | None, _PLUGINS] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="Times a failed run is tried again: 1.")
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add to the sweep that DIR has.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Time a pass on this machine, to estimate the cost.")
    ] = True,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Plan a sweep: a run for every target, algorithm, optimizer, averaging, trial and draw."""
    from rich.console import Console

    from steppe import sweeps
    from steppe.sweeps import cost

    given = {
        "steps": steps,
        "backbone": backbone,
        "weights": weights,
        "root": str(root) if root else None,
        "plugins": plugin,
    }
    grid = sweeps.Grid(
        _names(datasets),
        _names(algorithms),
        _names(optimizers),
        _names(averaging),
        trials,
        draws,
        targets,
        space,
        tuple(overrides or ()),
        {key: value for key, value in given.items() if value is not None},
    )
    command = shlex.join(["steppe", *sys.argv[1:]])
    plan = sweeps.write_plan(grid, path, retries=retries, command=command, extend=extend)
    found = cost.estimate(plan, measured=estimate)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    Console().print(cost.table(found))
    print(f"{path}: {len(plan.names):,} runs planned; start them with 'steppe sweep run {path}'")


@sweep_app.command("run")
def sweep_run(
    path: Annotated[Path, _SWEEP],
    launcher: Annotated[
        Literal["local", "ray", "slurm"], typer.Option(help="What starts the workers.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="How many; all GPUs or cores (Slurm: at most 16) else."),
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Workers that share a GPU.")] = 1,
    threads: Annotated[int, _THREADS] = 1,
    stale: Annotated[float, _STALE] = 60.0,
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster: $RAY_ADDRESS, or one that is started here."),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="For sbatch, such as --sbatch=--time=12:00:00."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only write the script for Slurm.")
    ] = False,
) -> None:
    """Carry a sweep out: start workers, and wait for its end (Slurm: only submit them)."""
    from steppe.sweeps import launch

    done = launch.run(
        path,
        launcher,
        workers=workers,
        per_gpu=per_gpu,
        threads=threads,
        stale=stale,
        address=address,
        sbatch=tuple(sbatch or ()),
        dry_run=dry_run,
    )
    if done is not None and not done:
        raise typer.Exit(1)


@sweep_app.command("work")
def sweep_work(
    path: Annotated[Path, _SWEEP],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int, _THREADS] = 1,
    stale: Annotated[float, _STALE] = 60.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Runs to take, at most.")] = None,
) -> None:
    """Take runs from a sweep, one after the other, until none is left: what launchers start."""
    from steppe import sweeps

    _talk()
    sweeps.work(path, device, threads, stale, limit)


@sweep_app.command("status")
def sweep_status(
    path: Annotated[Path, _SWEEP],
    watch: Annotated[bool, typer.Option("--watch", help="Look again, until it is over.")] = False,
    stale: Annotated[float, _STALE] = 60.0,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show how far a sweep is: counts, speed, the time that is left, what failed."""
    from rich.console import Console

    from steppe.sweeps import read_plan, status

    plan = read_plan(path)
    if as_json:
        print(json.dumps(status.look(plan, stale).to_json(), indent=2))
    elif watch:
        status.watch(plan, Console(), stale)
    else:
        Console().print(status.show(plan, status.look(plan, stale)))


_RUNS = typer.Argument(metavar="[RUN]...", help="Names of runs; all that apply unless given.")


@sweep_app.command("retry")
def sweep_retry(
    path: Annotated[Path, _SWEEP], runs: Annotated[list[str] | None, _RUNS] = None
) -> None:
    """Let runs that failed or were cancelled be tried again."""
    from steppe.sweeps import read_plan, retry

    changed = retry(read_plan(path), tuple(runs or ()))
    print(f"{len(changed):,} runs will be tried again; 'steppe sweep run {path}' starts them")


@sweep_app.command("cancel")
def sweep_cancel(
    path: Annotated[Path, _SWEEP], runs: Annotated[list[str] | None, _RUNS] = None
) -> None:
    """Take runs out of a sweep that are planned or at work; 'retry' brings them back."""
    from steppe.sweeps import cancel, read_plan

    changed = cancel(read_plan(path), tuple(runs or ()))
    print(f"{len(changed):,} runs cancelled; those at work stop within seconds")


@sweep_app.command("ensemble")
def sweep_ensemble(
    path: Annotated[Path, _SWEEP],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Evaluate, for every method and target, the ensemble of all its trials and draws."""
    from rich.console import Console
    from rich.progress import track

    from steppe.sweeps import ensemble, read_plan

    plan = read_plan(path)
    console = Console(stderr=True)
    each = track(ensemble.ensembles(plan, device), "ensembles", console=console, transient=True)
    found = list(each)
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
    else:
        Console().print(ensemble.table(found))
    ensemble.save(plan, found)


@app.command()
def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Sweeps, runs, or folders of runs.")
    ],
    selection: Annotated[
        Literal["train-val", "leave-one-out", "oracle"],
        typer.Option(help="How a step and hyper-parameters are chosen."),
    ] = "train-val",
    form: Annotated[
        Literal["terminal", "markdown", "latex", "csv", "json", "html"],
        typer.Option("--format", help="What to write."),
    ] = "terminal",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", callback=_writable, help="Write it here instead of printing."
        ),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(
            "--best", metavar="FILE", callback=_writable, help="Write the chosen configs as JSON."
        ),
    ] = None,
) -> None:
    """Make tables of many runs: the mean over trials of what the selection chooses."""
    from steppe import reports

    command = shlex.join(["steppe", *sys.argv[1:]])
    title = ", ".join(str(path) for path in paths)
    made = reports.build_report(reports.load_runs(paths), selection, command, title)
    text = reports.write(made, form)
    if out is not None:
        out.write_text(text, encoding="utf-8")
        print(f"{out}: {len(made.selected.runs):,} runs", file=sys.stderr)
    else:
        print(text, end="" if text.endswith("\n") else "\n")
    if best is not None:
        best.write_text(reports.best_json(made.best), encoding="utf-8")
    for problem in made.problems:
        print(f"steppe: {problem}", file=sys.stderr)


@import_app.command("domainbed")
def import_domainbed(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder with DomainBed's runs.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where steppe's are written.")],
) -> None:
    """Read DomainBed's output folders, so that 'steppe report' can make tables of them."""
    from steppe import reports

    imported = reports.import_domainbed(source, target)
    for problem in imported.problems:
        print(f"steppe: {problem}", file=sys.stderr)
    print(f"{target}: {imported.n:,} runs; see them with 'steppe report {target}'")


_NAME = typer.Argument(metavar="NAME", help="A dataset's name, or a folder DOMAIN/CLASS/IMAGE.")
_JOBS = typer.Option("--jobs", min=1, help="Processes that decode; one per core unless given.")


@data_app.command("list")
def data_list(
    root: Annotated[Path | None, _ROOT] = None,
    plugin: Annotated[list[str] | None, _PLUGINS] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the datasets that are known, and where each was found."""
    from steppe.domains import data_folder, import_plugins, listing

    import_plugins(plugin or ())
    rows = listing.find_all(root or data_folder())
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
        return
    from rich.console import Console

    Console().print(listing.table(rows))
    print("'--json' has where they were found; 'steppe data get NAME' fetches one.")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset's name.")],
    root: Annotated[Path | None, _ROOT] = None,
) -> None:
    """Download a dataset and lay it out, resuming where an earlier attempt stopped."""
    from steppe.domains import data_folder, mirrors

    folder = mirrors.get(name, root or data_folder())
    where = f" --root {shlex.quote(str(root))}" if root else ""
    print(f"{folder}: check it with 'steppe data check {name}{where}'")


@data_app.command("check")
def data_check(
    name: Annotated[str, _NAME],
    root: Annotated[Path | None, _ROOT] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    plugin: Annotated[list[str] | None, _PLUGINS] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Check a dataset's layout, counts and every image; exit with 1 if anything is wrong."""
    from rich.console import Console

    from steppe.domains import check, data_folder, dataset_spec, import_plugins

    import_plugins(plugin or ())
    home = root or data_folder()
    report = check.check(dataset_spec(name), home, jobs=jobs, console=Console(stderr=True))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(*check.tables(report), sep="\n", soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


@data_app.command("pack")
def data_pack(
    name: Annotated[str, _NAME],
    size: Annotated[
        int, typer.Option(min=1, help="Shrink images whose shorter side is longer.")
    ] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace a pack that is there.")] = False,
    root: Annotated[Path | None, _ROOT] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    plugin: Annotated[list[str] | None, _PLUGINS] = None,
) -> None:
    """Decode every image once, into memory-mapped files that runs then use."""
    from rich.console import Console

    from steppe.domains import data_folder, import_plugins, load, packing

    import_plugins(plugin or ())
    home = root or data_folder()
    dataset = load(name, home, packed=False)
    console = Console(stderr=True)
    path = packing.make(dataset, home, size, force=force, jobs=jobs, console=console)
    print(f"{path}: runs on {dataset.spec.name} use it from now on")


def _talk() -> Any:
    """What steppe logs goes to the terminal, above a progress bar if there is one."""
    from rich.console import Console

    console = Console(stderr=True)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)

    # Of several processes, one talks; the others only when something is wrong.
    handler = Handler(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("steppe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return console


_SAVE = typer.Option(
    "--save", metavar="FILE", callback=_writable, help="Also store the result as JSON in FILE."
)
_DEVICE = typer.Option("--device", help="cpu, cuda, or a device such as cuda:1.")


@bench_app.command("optim")
def bench_optim(
    device: Annotated[str, _DEVICE] = "cpu",
    rounds: Annotated[int, typer.Option(min=2, help="Measurements of each contender.")] = 15,
    as_json: Annotated[bool, _JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time the arithmetic between gradients against its floor and against another SAM."""
    from steppe.bench import optim
    from steppe.training.processes import find_device

    result = optim.measure(find_device(device), rounds)
    _show(result, optim.tables(result), as_json, save)


@bench_app.command("step")
def bench_step(
    device: Annotated[str, _DEVICE] = "cpu",
    backbone: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "resnet18",
    batch: Annotated[int, typer.Option(min=3, help="Images in a step, of three domains.")] = 24,
    optimizer: Annotated[str, typer.Option(help="Any that 'steppe train' knows.")] = "adam",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="Compare its step with ERM's; may be repeated; all: every algorithm."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a measurement.")] = 4,
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16.")] = "fp32",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As in 'steppe train', to see what it costs.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time a step of the training loop, and what it adds to forward, backward and optimizer.

    With --algorithm, compare the steps of algorithms instead.
    """
    from steppe.algorithms import algorithm_names, algorithm_spec
    from steppe.bench import step
    from steppe.training.processes import find_device

    if algorithm:
        if deterministic:
            raise UserError("--deterministic and --algorithm cannot be given together")
        chosen = [algorithm_spec(name).name for name in algorithm if name != "all"]
        names = algorithm_names() if "all" in algorithm else chosen
        compared = step.compare(
            find_device(device), backbone, batch, optimizer, rounds, steps, precision, names
        )
        _show(compared, step.comparison_tables(compared), as_json, save)
        return
    result = step.measure(
        find_device(device), backbone, batch, optimizer, rounds, steps, precision, deterministic
    )
    _show(result, step.tables(result), as_json, save)


@bench_app.command("fidelity")
def bench_fidelity(
    device: Annotated[str, _DEVICE] = "cpu",
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
    as_json: Annotated[bool, _JSON] = False,
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


@bench_app.command("curvature")
def bench_curvature(
    device: Annotated[str, _DEVICE] = "cpu",
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
    as_json: Annotated[bool, _JSON] = False,
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


@bench_app.command("sweep")
def bench_sweep(
    runs: Annotated[int, typer.Option(min=6, help="Runs in the sweep.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 40,
    as_json: Annotated[bool, _JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time what a sweep adds to its runs: launcher, worker, claims, commits."""
    from steppe.bench import sweeps

    result = sweeps.sweep_overhead(runs, steps)
    _show(result, sweeps.tables(result), as_json, save)


@bench_app.command("report")
def bench_report(
    runs: Annotated[int, typer.Option(min=1, help="Runs, made up.")] = 10_000,
    records: Annotated[int, typer.Option(min=1, help="Records of each.")] = 17,
    as_json: Annotated[bool, _JSON] = False,
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


def main() -> None:
    """Run the command line; the `steppe` script and `python -m steppe` call this."""
    try:
        app(prog_name="steppe")
    except UserError as error:
        _fail(str(error), code=2)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", code=2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "steppe":
            raise
        sys.exit(_missing(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Interrupted as error:
        sys.exit(error.code)
    except RunError as error:
        _fail(str(error), code=1)


def _fail(message: str, code: int) -> None:
    print(f"steppe: {message}", file=sys.stderr)
    sys.exit(code)
