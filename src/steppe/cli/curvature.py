"""`steppe curvature`: how flat the minimum of a run is."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steppe.measure.settings import Precision, Settings
from steppe.strangers import printable

from .common import JSON, ROOT, WHICH, talk, writable


class _MeasuresUnlessTold(TyperGroup):
    """`curvature RUN` is `curvature measure RUN`; a run called compare is ./compare."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_MeasuresUnlessTold,
    help="Measure how flat a run's minimum is: 'steppe curvature RUN' (the options: 'steppe "
    "curvature measure --help'); then compare runs.",
)
_DOMAIN = typer.Option(
    "--domain",
    metavar="NAME",
    help="A domain to measure on, may be repeated (default: those the run was trained on).",
)


@app.command("measure")
def curvature_measure(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    domain: Annotated[list[str] | None, _DOMAIN] = None,
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues, the largest first.")] = Settings.top,
    images: Annotated[
        int, typer.Option(min=0, help="Drawn evenly from the domains; 0: all of them.")
    ] = Settings.images,
    which: Annotated[str, WHICH] = Settings.which,
    rho: Annotated[
        float | None,
        typer.Option(help="The radius of R0, R1 and R_FAD (default: the optimizer's, or 0.05)."),
    ] = Settings.rho,
    alpha: Annotated[
        float | None, typer.Option(help="The share of R0 in R_FAD (default: FAD's, or 0.5).")
    ] = Settings.alpha,
    tol: Annotated[
        float, typer.Option(help="Residual to reach, relative to the largest eigenvalue.")
    ] = Settings.tol,
    trace_rtol: Annotated[
        float, typer.Option(help="Standard error of the trace to reach, relative to it.")
    ] = Settings.trace_rtol,
    density: Annotated[
        bool, typer.Option("--density", help="Also estimate how all eigenvalues are spread.")
    ] = Settings.density,
    precision: Annotated[Precision, typer.Option(help="Of the computation.")] = Settings.precision,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images in a batch, 64 if they are large: fewer need less memory."
        ),
    ] = Settings.batch_size,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    root: Annotated[Path | None, ROOT] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the images drawn and the random vectors.")
    ] = Settings.seed,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Measure a run's loss around its weights: eigenvalues and trace of the Hessian, flatness.

    The result goes to RUN/curvature/NAME.json and is shown by 'steppe report RUN --format html'.
    With --json, a line for each run.
    """
    from steppe.console import Meter, say, stdout
    from steppe.measure import measure_run
    from steppe.measure.measuring import run_folder
    from steppe.measure.stored import measurement_file
    from steppe.reports.measured import measured_table, remarks

    settings = Settings(
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
        precision=precision,
    )
    console, folder = talk(), str(root) if root else None
    for run in runs:
        if not console.is_terminal:
            say(console, f"curvature of {run}")
        with Meter(f"curvature of {run}", 1.0, console=console, unit="share") as meter:
            measured = measure_run(run, settings, device=device, root=folder, meter=meter)
        if as_json:
            print(json.dumps(measured.to_json()))
            continue
        stdout().print(measured_table(measured))
        for remark in remarks(measured):
            print(printable(f"note: {remark}"))
        where = measurement_file(run_folder(run), measured.name)
        print(printable(f"{where}: written after {measured.seconds:.0f} s"))


@app.command("compare")
def curvature_compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Runs, sweeps, or folders of runs.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", callback=writable, help="The figure: .svg, .png or .pdf."
        ),
    ] = Path("curvature.svg"),
    domain: Annotated[list[str] | None, _DOMAIN] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help="Only runs that hold out exactly this target, may be repeated (default: all).",
        ),
    ] = None,
    which: Annotated[str, WHICH] = "last",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Draw the spectra of measured runs by method, their largest eigenvalues and traces."""
    from steppe.console import printed
    from steppe.reports import curvature, load_runs, spectra
    from steppe.reports.render import to_terminal

    spectra.check_format(out)
    loaded = load_runs(paths)
    compared = curvature.compare(loaded.runs, domain, which, target)
    spectra.draw(compared, out)
    print(printable(f"{out}: drawn"), file=sys.stderr)
    if as_json:
        print(json.dumps(compared.to_json(), indent=2))
    else:
        print(printed([to_terminal(curvature.comparison_text(compared))]), end="")
    for note in compared.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    for problem in loaded.problems:
        print(printable(f"steppe: {problem}"), file=sys.stderr)
