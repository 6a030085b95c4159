"""`steppe reproduce` and `steppe demo`: experiments, from their plan to their tables."""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steppe.strangers import command, printable

from .common import BACKBONE, JSON, OVERRIDES, PLUGINS, ROOT, WEIGHTS, names, talk

if TYPE_CHECKING:
    from steppe.paper import Order
    from steppe.sweeps import Sweep


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Output folder (default: a temporary directory)."
        ),
    ] = None,
) -> None:
    """Compare the optimizers on built-in data, each domain held out in turn: minutes on a CPU."""
    reproduce("demo", out=out or Path(tempfile.mkdtemp(prefix="steppe-demo-")))


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="An experiment; without one, they are listed.")
    ] = "",
    scale: Annotated[
        Literal["full", "small", "smoke"], typer.Option(help="How much of it is run.")
    ] = "small",
    datasets: Annotated[
        str, typer.Option(help="Names or folders, with commas (default: the scale's).")
    ] = "",
    optimizers: Annotated[
        str,
        typer.Option(help="Of the experiment's, with commas, or all (default: the scale's)."),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The sweep's folder: reproduce/NAME-SCALE."),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds (default: the scale's).")] = (
        None
    ),
    draws: Annotated[
        int | None,
        typer.Option(min=0, help="Hyper-parameters drawn; with 0, learning rates are tuned."),
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the paper's updates.")
    ] = None,
    factors: Annotated[
        str,
        typer.Option(
            help="Learning rates to try, as multiples of the default, with commas "
            "(default: the scale's)."
        ),
    ] = "",
    backbone: Annotated[str | None, BACKBONE] = None,
    weights: Annotated[str | None, WEIGHTS] = None,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    root: Annotated[Path | None, ROOT] = None,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="What starts the workers.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many (default: all GPUs or cores).")
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Workers that share a GPU.")] = 1,
    only_plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only plan the runs, to be carried out by 'steppe sweep run DIR'."
        ),
    ] = False,
    plugin: Annotated[list[str] | None, PLUGINS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Run a table or figure of the paper, and show the paper's numbers beside ours.

    It is a sweep: interrupted at any moment, the same command goes on with it.
    """
    from steppe import paper
    from steppe.domains import import_plugins

    import_plugins(plugin or ())
    if not name:
        _list()
        return
    changes = {"trials": trials, "draws": draws, "share": share, "factors": _numbers(factors)}
    given = {
        "backbone": backbone,
        "weights": weights,
        "root": str(root) if root else None,
        "plugins": plugin or None,
    }
    order = paper.make_order(
        name,
        scale,
        datasets=names(datasets),
        optimizers=names(optimizers),
        changes={key: value for key, value in changes.items() if value is not None},
        overrides=tuple(overrides or ()),
        options={key: value for key, value in given.items() if value is not None},
    )
    folder = out or Path("reproduce") / f"{name}-{scale}"
    typed = command("steppe", *sys.argv[1:])
    begun = (folder / "sweep.json").exists()  # and perhaps done: its tables need no images
    _look_for_images(order, warn=only_plan or begun or launcher == "ray")
    if only_plan:
        _plan(order, folder, typed)
        return

    def carry_out(sweep: "Sweep") -> None:
        from steppe.sweeps import Crew, launch

        launch.run(sweep.path, launcher, Crew(workers, per_gpu))

    from steppe.console import say

    console = talk()
    found = paper.reproduce(
        order, folder, carry_out, command=typed, say=lambda line: say(console, line)
    )
    facts = _facts(order)
    files = paper.write_results(found, folder, facts, facts["command"])
    _show(found, as_json)
    if files:
        print(f"written: {', '.join(map(printable, files))}", file=sys.stderr)
    if found.problems:
        raise typer.Exit(1)


def _look_for_images(order: "Order", warn: bool) -> None:
    """Finds out before anything is planned whether the images are there."""
    from steppe.domains import load
    from steppe.errors import UserError
    from steppe.paper.order import first_configs

    for config in first_configs(order):
        try:
            load(config.dataset, config.root, packed=config.packed)
        except UserError as error:
            if not warn:
                raise
            text = f"steppe: not on this machine, workers need it: {error}"
            print(printable(text), file=sys.stderr)


def _numbers(text: str) -> tuple[float, ...] | None:
    try:
        found = tuple(float(word) for word in names(text))
        if len(set(found)) < len(found) or not all(0 < number < math.inf for number in found):
            raise ValueError
    except ValueError:
        problem = f"{text}: give different positive numbers with commas, such as 0.3,1,3"
        raise typer.BadParameter(problem, param_hint="--factors") from None
    return found or None


def _facts(order: "Order") -> dict[str, Any]:
    from steppe.environment import environment
    from steppe.training.processes import find_device

    return environment(find_device(str(order.options.get("device", "auto"))))


def _plan(order: "Order", folder: Path, typed: str) -> None:
    from steppe import paper
    from steppe.console import stdout
    from steppe.sweeps import cost

    sweep, rates = paper.plan(order, folder, typed)
    stdout().print(cost.table(cost.estimate(sweep, measured=False)))
    n = len(sweep.names)
    start = command("steppe", "sweep", "run", folder)
    print(f"{printable(folder)}: {n:,} runs planned; start them with: {start}")
    if rates is None:
        print("learning rates are still to be tuned; the same command plans the others after that")


def _show(found: Any, as_json: bool) -> None:
    from steppe.console import printed
    from steppe.paper.results import to_json
    from steppe.paper.tables import tables
    from steppe.reports.render import to_terminal

    if as_json:
        print(json.dumps(to_json(found), indent=1))
        return
    print(printed([to_terminal(table) for table in tables(found)]), end="")
    for problem in found.problems:
        print(printable(f"steppe: {problem}"), file=sys.stderr)


def _list() -> None:
    from steppe.console import stdout, table
    from steppe.paper import EXPERIMENTS, SCALES

    rows = [(one.name, one.about, ", ".join(one.datasets)) for one in EXPERIMENTS.entries()]
    headings = ("experiment", "what it shows", "datasets of the paper")
    stdout().print(table(headings, rows, labels=3, plain=True))
    for scale in SCALES.entries():
        print(f"--scale {scale.name}: {scale.about}")
