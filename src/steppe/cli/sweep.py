"""`steppe sweep`: many runs, on one machine or a cluster."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steppe.strangers import command, printable
from steppe.training.config import RunConfig

from .common import JSON, OVERRIDES, names, talk
from .keys import with_keys
from .launchers import RunCommand

app = typer.Typer(help="Sweeps: many runs, on one machine or a cluster.")
_SWEEP = typer.Argument(metavar="DIR", help="The sweep's folder.")
_STALE = typer.Option(
    "--stale", min=1, help="Seconds of silence after which a worker is taken for dead."
)
_THREADS = typer.Option("--threads", min=1, help="Threads of each worker, on a CPU.")
_RUNS = typer.Argument(metavar="[RUN]...", help="Names of runs (default: all that apply).")


# What a sweep varies, or a worker decides, is no option of all its runs.
_VARIED = {
    "dataset",
    "targets",
    "sources",
    "algorithm",
    "optimizer",
    "averaging",
    "trial_seed",
    "seed",
}
_VARIED |= {"draw", "space", "device", "version", "resolved", "data"}


@app.command("plan")
@with_keys(*(key for key in RunConfig.model_fields if key not in _VARIED))
def sweep_plan(
    path: Annotated[Path, _SWEEP],
    given: dict[str, Any],
    datasets: Annotated[str, typer.Option(help="Names or folders, with commas.")],
    algorithms: Annotated[str, typer.Option(help="Names, with commas.")] = "ERM",
    optimizers: Annotated[str, typer.Option(help="Names, with commas.")] = "adam",
    averaging: Annotated[str, typer.Option(help="Names, with commas.")] = "none",
    trials: Annotated[int, typer.Option(min=1, help="Seeds of the split.")] = 3,
    draws: Annotated[
        int,
        typer.Option(
            min=0,
            help="Hyperparameter samples per method; sample 0 is the defaults. 0 uses the settings "
            "of 'steppe train'.",
        ),
    ] = 20,
    targets: Annotated[
        str,
        typer.Option(
            help="single: each in turn; pairs: also pairs, for leave-one-domain-out selection; or "
            "names, with commas."
        ),
    ] = "single",
    space: Annotated[
        str,
        typer.Option(
            help="Where defaults and draws come from: fair (tuned per optimizer), fad (the "
            "paper's) or domainbed."
        ),
    ] = "fair",
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="How often a failed run is tried again (default: 1).")
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add to the sweep that DIR has.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Time a pass on this machine, to estimate the cost.")
    ] = True,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Plan a sweep: a run for every target, algorithm, optimizer, averaging, trial and draw."""
    from steppe import sweeps
    from steppe.console import stdout
    from steppe.sweeps import cost

    grid = sweeps.Grid(
        datasets=names(datasets),
        algorithms=names(algorithms),
        optimizers=names(optimizers),
        averaging=names(averaging),
        trials=trials,
        draws=draws,
        targets=targets,
        space=space,
        overrides=tuple(overrides or ()),
        options=given,
    )
    typed = command("steppe", *sys.argv[1:])
    plan = sweeps.write_plan(grid, path, retries=retries, command=typed, extend=extend)
    found = cost.estimate(plan, measured=estimate)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    stdout().print(cost.table(found))
    start = command("steppe", "sweep", "run", path)
    print(f"{printable(path)}: {len(plan.names):,} runs planned; start them with: {start}")


@app.command("run", cls=RunCommand)
def sweep_run(
    context: typer.Context,
    path: Annotated[Path, _SWEEP],
    launcher: Annotated[
        str, typer.Option(help="What starts the workers: local, ray, slurm, or a plugin's.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="How many (default: all GPUs or cores; on Slurm at most 16)."),
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Workers that share a GPU.")] = 1,
    threads: Annotated[int, _THREADS] = 1,
    stale: Annotated[float, _STALE] = 60.0,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A module that registers a launcher.")
    ] = None,
) -> None:
    """Carry a sweep out: start workers, and wait for its end (Slurm: only submit them)."""
    from steppe.sweeps import Crew, launch

    crew = Crew(workers, per_gpu, threads, stale)
    if launch.run(path, launcher, crew, **context.obj) is False:
        raise typer.Exit(1)


@app.command("work")
def sweep_work(
    path: Annotated[Path, _SWEEP],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int, _THREADS] = 1,
    stale: Annotated[float, _STALE] = 60.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Runs to take, at most.")] = None,
) -> None:
    """Take runs from a sweep, one after the other, until none is left: what launchers start."""
    from steppe import sweeps

    talk()
    sweeps.work(path, device, threads, stale, limit)


@app.command("status")
def sweep_status(
    path: Annotated[Path, _SWEEP],
    watch: Annotated[bool, typer.Option("--watch", help="Look again, until it is over.")] = False,
    stale: Annotated[float, _STALE] = 60.0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show how far a sweep is: counts, speed, the time that is left, what failed."""
    from steppe.console import stdout
    from steppe.sweeps import read_plan, status

    plan = read_plan(path)
    if as_json:
        print(json.dumps(status.look(plan, stale).to_json(), indent=2))
    elif watch:
        status.watch(plan, stdout(), stale)
    else:
        stdout().print(status.show(plan, status.look(plan, stale)))


@app.command("retry")
def sweep_retry(
    path: Annotated[Path, _SWEEP], runs: Annotated[list[str] | None, _RUNS] = None
) -> None:
    """Let runs that failed or were cancelled be tried again."""
    from steppe.sweeps import read_plan, retry

    changed = retry(read_plan(path), tuple(runs or ()))
    start = command("steppe", "sweep", "run", path)
    print(f"{len(changed):,} runs will be tried again; start them with: {start}")


@app.command("cancel")
def sweep_cancel(
    path: Annotated[Path, _SWEEP], runs: Annotated[list[str] | None, _RUNS] = None
) -> None:
    """Take runs out of a sweep that are planned or at work; 'retry' brings them back."""
    from steppe.sweeps import cancel, read_plan

    changed = cancel(read_plan(path), tuple(runs or ()))
    print(f"{len(changed):,} runs cancelled; those at work stop within seconds")


@app.command("ensemble")
def sweep_ensemble(
    path: Annotated[Path, _SWEEP],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Evaluate, for every method and target, the ensemble of all its trials and draws."""
    from steppe.console import Meter, stderr, stdout
    from steppe.sweeps import ensemble, read_plan

    plan, found = read_plan(path), []
    with Meter("ensembles", console=stderr()) as meter:
        for one in ensemble.ensembles(plan, device):
            found.append(one)
            meter.advance()
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
    else:
        stdout().print(ensemble.table(found))
    ensemble.save(plan, found)
