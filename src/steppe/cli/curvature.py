"""`steppe curvature`: measure the flatness of a run's minimum."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steppe.measure.settings import Settings
from steppe.strangers import printable

from .common import Device, Json, Root, Runs, Which, remark, talk, writable
from .options import fields, with_options


class _MeasuresUnlessTold(TyperGroup):
    """Makes `curvature RUN` mean `curvature measure RUN`; a run named compare is ./compare."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_MeasuresUnlessTold,
    help="Measure how flat a run's minimum is, or compare measured runs.\n\n"
    "'steppe curvature RUN' is short for 'steppe curvature measure RUN'.",
)
_Domains = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Domain to measure on; repeatable (default: the run's training domains).",
    ),
]
_SETTINGS = [
    *fields(Settings, "top", "images"),
    *fields(Settings, "which", metavar="last|best|step:N"),
    *fields(Settings, "rho", "alpha", "tol", "trace_rtol", "density", "precision", "batch_size"),
    *fields(Settings, "seed", min=0),
]


@app.command("measure")
@with_options(settings=_SETTINGS)
def curvature_measure(
    runs: Runs,
    settings: dict[str, Any],
    domain: _Domains = None,
    device: Device = "auto",
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Measure the loss around a run's weights: Hessian eigenvalues, trace, flatness.

    Writes RUN/curvature/NAME.json, which 'steppe report RUN --format html' shows. With --density,
    also draws the spectral density to NAME.svg; without it, removes an earlier drawing. With
    --json, prints one line per run.
    """
    from steppe.console import Meter, say, stdout
    from steppe.measure import measure_run
    from steppe.measure.measuring import run_folder
    from steppe.measure.stored import measurement_file
    from steppe.reports.measured import measured_table, remarks
    from steppe.reports.spectra import draw_measured

    wanted = Settings(domains=domain, **settings)
    console, folder = talk(), str(root) if root else None
    for run in runs:
        if not console.is_terminal:
            say(console, f"curvature of {run}")
        with Meter(f"curvature of {run}", 1.0, console=console, unit="share") as meter:
            measured = measure_run(run, wanted, device=device, root=folder, meter=meter)
        where = measurement_file(run_folder(run), measured.name)
        figure = where.with_suffix(".svg")
        if measured.density is not None:
            draw_measured(measured, figure)
            remark(f"{figure}: drawn")
        elif figure.exists():
            figure.unlink()
            remark(f"{figure}: removed, because it showed an earlier measurement")
        if as_json:
            print(json.dumps(measured.to_json()))
            continue
        stdout().print(measured_table(measured))
        for note in remarks(measured):
            print(printable(f"note: {note}"))
        print(printable(f"{where}: written in {measured.seconds:.0f} s"))


@app.command("compare")
def curvature_compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Runs, sweeps, or folders of runs.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", callback=writable, help="Figure file: .svg, .png or .pdf."),
    ] = Path("curvature.svg"),
    domain: _Domains = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only runs that hold out exactly this target; repeatable (default: all).",
        ),
    ] = None,
    which: Which = "last",
    as_json: Json = False,
) -> None:
    """Plot the spectra of measured runs by method, with their largest eigenvalues and traces."""
    from steppe.console import printed
    from steppe.reports import curvature, load_runs, spectra
    from steppe.reports.render import to_terminal

    spectra.check_format(out)
    loaded = load_runs(paths)
    compared = curvature.compare(loaded.runs, domain, which, target)
    spectra.draw(compared, out)
    remark(f"{out}: drawn")
    if as_json:
        print(json.dumps(compared.to_json(), indent=2))
    else:
        print(printed([to_terminal(curvature.comparison_text(compared))]), end="")
    for note in compared.notes:
        remark(f"note: {note}")
    for problem in loaded.problems:
        remark(f"steppe: {problem}")
