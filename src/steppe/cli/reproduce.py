"""`steppe reproduce` and `steppe demo`: run experiments, from plan to tables."""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steppe.paper.experiment import Scale
from steppe.strangers import command
from steppe.sweeps import Crew

from .common import Json, Overrides, Plugins, remark, talk
from .options import fields, keys, names, with_options
from .sweep import show_plan

if TYPE_CHECKING:
    from steppe.paper import Order, Results
    from steppe.sweeps import Sweep

_SCALES = "the scale's"


def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder (default: a temporary directory)."),
    ] = None,
) -> None:
    """Compare optimizers on built-in data, leave-one-domain-out; takes minutes on a CPU."""
    reproduce(name="demo", out=out or Path(tempfile.mkdtemp(prefix="steppe-demo-")))


@with_options(
    changes=[
        *fields(Scale, "trials", default=_SCALES, min=1),
        *fields(Scale, "draws", default=_SCALES, min=0),
        *fields(Scale, "share", default=_SCALES, min=0, max=1),
        *fields(Scale, "factors", default=_SCALES),
    ],
    options=keys("backbone", "weights", "root"),
    crew=[
        *fields(Crew, "workers", help="Number of workers (default: one per GPU or core).", min=1),
        *fields(Crew, "per_gpu", min=1),
    ],
)
def reproduce(
    changes: dict[str, Any],
    options: dict[str, Any],
    crew: dict[str, Any],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Experiment (default: list all experiments).")
    ] = "",
    scale: Annotated[
        Literal["full", "small", "smoke"], typer.Option(help="Size of the experiment.")
    ] = "small",
    datasets: Annotated[
        str,
        typer.Option(help="Comma-separated dataset names or folders (default: the scale's)."),
    ] = "",
    optimizers: Annotated[
        str,
        typer.Option(
            help="Comma-separated subset of the experiment's optimizers, or all (default: the "
            "scale's)."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Sweep folder (default: reproduce/NAME-SCALE)."),
    ] = None,
    overrides: Overrides = None,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to start the workers.")
    ] = "local",
    only_plan: Annotated[
        bool,
        typer.Option("--plan", help="Only plan the runs; start them with 'steppe sweep run DIR'."),
    ] = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper, and show the paper's numbers beside ours.

    If interrupted, rerun the same command to continue.
    """
    from steppe import paper
    from steppe.console import say
    from steppe.environment import environment
    from steppe.sweeps import launch
    from steppe.training.processes import find_device

    if not name:
        _list()
        return
    order = paper.make_order(
        name,
        scale,
        datasets=names(datasets),
        optimizers=names(optimizers),
        changes=changes,
        overrides=tuple(overrides or ()),
        options={**options, **({"plugins": plugin} if plugin else {})},
    )
    folder = out or Path("reproduce") / f"{name}-{scale}"
    typed = command("steppe", *sys.argv[1:])
    begun = (folder / "sweep.json").exists()  # if all runs are done, the tables need no images
    _look_for_images(order, warn=only_plan or begun or launcher == "ray")
    if only_plan:
        sweep, rates = paper.plan(order, folder, typed)
        show_plan(sweep, estimate=False)
        if rates is None:
            print("These runs tune the learning rates. When they are done, rerun this command.")
        return

    def carry_out(sweep: "Sweep") -> None:
        launch.run(sweep.path, launcher, Crew(**crew))

    console = talk()
    found = paper.reproduce(
        order, folder, carry_out, command=typed, say=lambda line: say(console, line)
    )
    facts = environment(find_device(str(order.options.get("device", "auto"))))
    files = paper.write_results(found, folder, facts, facts["command"])
    _show(found, as_json)
    if files:
        remark(f"written: {', '.join(map(str, files))}")
    if found.problems:
        raise typer.Exit(1)


def _look_for_images(order: "Order", warn: bool) -> None:
    """Check for the images before planning anything."""
    from steppe.domains import load
    from steppe.errors import UserError
    from steppe.paper.order import first_configs

    for config in first_configs(order):
        try:
            load(config.dataset, config.root, packed=config.packed)
        except UserError as error:
            if not warn:
                raise
            remark(f"steppe: missing on this machine, but workers need it: {error}")


def _show(found: "Results", as_json: bool) -> None:
    from steppe.console import printed
    from steppe.paper.results import to_json
    from steppe.paper.tables import tables
    from steppe.reports.render import to_terminal

    if as_json:
        print(json.dumps(to_json(found), indent=1))
        return
    print(printed([to_terminal(table) for table in tables(found)]), end="")
    for problem in found.problems:
        remark(f"steppe: {problem}")


def _list() -> None:
    from steppe.paper import SCALES

    from .listing import KINDS, show_all

    show_all(KINDS["experiments"])
    for scale in SCALES.entries():
        print(f"--scale {scale.name}: {scale.about}")
