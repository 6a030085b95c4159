"""`steppe sweep`: many runs on one machine or a cluster."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.strangers import command, printable
from steppe.sweeps import Crew, Grid
from steppe.training.config import RunConfig

from .common import Device, Json, Overrides, talk
from .options import SHORTCUTS, RunCommand, fields, keys, names, overriding, with_options

if TYPE_CHECKING:
    from steppe.sweeps import Sweep

app = typer.Typer(help="Plan, run and monitor many runs on one machine or a cluster.")
_Sweep = Annotated[Path, typer.Argument(metavar="DIR", help="Sweep folder.")]
_Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Names of runs (default: all eligible runs)."),
]
LauncherName = Annotated[
    str, typer.Option(help="Where to start workers: local, ray, slurm, or a plugin's launcher.")
]
LauncherPlugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Module that registers your own launcher; repeatable."),
]
# A sweep varies these, or a worker sets them, so they are not options of all runs.
VARIED = (
    *("dataset", "targets", "sources", "algorithm", "optimizer", "averaging", "trial_seed", "seed"),
    *("draw", "space", "device", "version", "merged_from", "resolved", "data"),
)


@app.command("plan")
@with_options(
    grid=[
        *fields(Grid, "algorithms", "optimizers", "averaging", "targets", "space"),
        *fields(Grid, "trials", min=1),
        *fields(Grid, "draws", min=0),
    ],
    options=keys(*(key for key in RunConfig.model_fields if key not in VARIED)),
    shortcuts=SHORTCUTS,
)
def sweep_plan(
    path: _Sweep,
    grid: dict[str, Any],
    options: dict[str, Any],
    shortcuts: dict[str, Any],
    datasets: Annotated[str, typer.Option(help="Comma-separated dataset names or folders.")],
    overrides: Overrides = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="How often to retry a failed run (default: 1).")
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add runs to the existing sweep in DIR.")
    ] = False,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan exactly the runs of a protocol, such as domainbed or yu2024 ('steppe "
            "protocol list').",
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option(help="Time a pass on this machine to estimate the cost.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Plan a sweep: one run per target, algorithm, optimizer, averaging, trial and draw."""
    from steppe.protocols.winners import reruns_left
    from steppe.sweeps import write_plan

    texts = tuple(overriding(options, shortcuts, overrides))
    wanted = {"datasets": names(datasets), **grid, "overrides": texts, "options": options}
    more: Any = {
        "retries": retries,
        "command": command("steppe", *sys.argv[1:]),
        "extend": extend,
    }
    if protocol is None:
        plan = write_plan(Grid(**wanted), path, **more)
    else:
        from steppe import protocols

        plan = protocols.plan(protocol, wanted, path, **more)
    show_plan(plan, estimate, as_json, reruns_left(plan))


def show_plan(plan: "Sweep", estimate: bool, as_json: bool = False, later: int = 0) -> None:
    """Print the cost of a plan; `later` is the number of runs that its results will add."""
    from steppe.console import stdout
    from steppe.sweeps import cost

    found = cost.estimate(plan, measured=estimate)
    if as_json:
        print(json.dumps({**asdict(found), "later": later}, indent=2))
        return
    stdout().print(cost.table(found))
    if later:
        print(f"When a search is done, its winner runs on more splits: up to {later:,} more runs.")
    if hint := cost.hint(found):
        print(hint)
    start = command("steppe", "sweep", "run", plan.path)
    print(f"{printable(plan.path)}: {len(plan.names):,} runs planned; start them with: {start}")


@app.command("run", cls=RunCommand)
@with_options(crew=fields(Crew, "workers", "per_gpu", "threads", "stale", min=1))
def sweep_run(
    context: typer.Context,
    path: _Sweep,
    crew: dict[str, Any],
    launcher: LauncherName = "local",
    plugin: LauncherPlugins = None,
) -> None:
    """Run a sweep: start workers and wait until all runs are done (Slurm: only submit)."""
    from steppe.protocols.winners import carry_on, reruns_left
    from steppe.sweeps import launch, read_plan

    def run() -> bool | None:
        return launch.run(path, launcher, Crew(**crew), **context.obj)

    complete = carry_on(path, run)
    if complete is False:
        raise typer.Exit(1)
    if complete is None and (later := reruns_left(read_plan(path))):
        print(
            f"When a search is done, rerun this command for the winner's other splits: up to "
            f"{later:,} more runs."
        )


@app.command("work")
@with_options(crew=fields(Crew, "threads", "stale", min=1))
def sweep_work(
    path: _Sweep,
    crew: dict[str, Any],
    device: Device = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of runs (default: no limit).")
    ] = None,
) -> None:
    """Execute a sweep's runs one by one until none is left; launchers start this command."""
    from steppe.sweeps import work

    talk()
    work(path, device, limit=limit, **crew)


@app.command("status")
@with_options(crew=fields(Crew, "stale", min=1))
def sweep_status(
    path: _Sweep,
    crew: dict[str, Any],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep updating until the sweep is over.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a sweep's progress: counts, throughput, time left, failures."""
    from steppe.console import stdout
    from steppe.sweeps import read_plan, status

    plan = read_plan(path)
    if as_json:
        print(json.dumps(status.look(plan, **crew).to_json(), indent=2))
    elif watch:
        status.watch(plan, stdout(), **crew)
    else:
        stdout().print(status.show(plan, status.look(plan, **crew)))


@app.command("retry")
def sweep_retry(path: _Sweep, runs: _Runs = None) -> None:
    """Make failed and cancelled runs available again."""
    from steppe.sweeps import read_plan, retry

    changed = retry(read_plan(path), tuple(runs or ()))
    start = command("steppe", "sweep", "run", path)
    print(f"{len(changed):,} runs can be retried; start them with: {start}")


@app.command("cancel")
def sweep_cancel(path: _Sweep, runs: _Runs = None) -> None:
    """Cancel planned and running runs; 'steppe sweep retry' brings them back."""
    from steppe.sweeps import cancel, read_plan

    changed = cancel(read_plan(path), tuple(runs or ()))
    print(f"{len(changed):,} runs cancelled; running ones stop within seconds")


@app.command("ensemble")
def sweep_ensemble(path: _Sweep, device: Device = "auto", as_json: Json = False) -> None:
    """Evaluate the ensemble of all trials and draws, for every method and target."""
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
