"""`steppe report`, `steppe compare` and `steppe import`."""

import gc
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from steppe.durable import replace
from steppe.strangers import command, printable

from .common import Json, Plugins, remark, writable

Selection = Annotated[
    Literal["train-val", "pooled-val", "leave-one-out", "oracle"] | None,
    typer.Option(
        help="Model selection: how to choose the step and hyperparameters (default: the "
        "protocol's, or train-val).",
        show_default=False,
    ),
]
import_app = typer.Typer(help="Import results of other programs.")


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Sweeps, runs, or folders of runs.")
    ],
    selection: Selection = None,
    form: Annotated[
        Literal["terminal", "markdown", "latex", "csv", "json", "html"],
        typer.Option("--format", help="Output format."),
    ] = "terminal",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Output file (default: stdout)."),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=writable, help="Also write the selected configs, as JSON."
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="Method to compare all others with, such as sgd; repeatable (default: the best "
            "and the cheapest).",
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Build result tables from many runs: means over trials of the selected models."""
    from steppe import reports
    from steppe.reports.values import dumps

    title = printable(", ".join(str(path) for path in paths))
    asked = command("steppe", *sys.argv[1:])
    # Millions of objects that live to the end: the collector would look through them for nothing.
    gc.disable()
    try:
        loaded = reports.load_runs(paths)
        gc.freeze()
    finally:
        gc.enable()
    made = reports.build_report(loaded, selection, asked, title, reference or ())
    text = reports.write(made, form)
    if out is not None:
        replace(out, text.encode())
        remark(f"{out}: {len(made.selected.runs):,} runs")
    else:
        shown = printable(text) if form == "csv" else text  # other formats escape names themselves
        print(shown, end="" if text.endswith("\n") else "\n")
    if best is not None:
        replace(best, dumps(made.best).encode())
    for problem in made.problems:
        remark(f"steppe: {problem}")


def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Two or more runs or sweeps; the others are compared with the first.",
        ),
    ],
    selection: Selection = None,
    as_json: Json = False,
) -> None:
    """Compare runs or sweeps, paired by target and trial seed."""
    from steppe.reports.beside import compare_runs
    from steppe.reports.values import dumps

    found = compare_runs(paths, selection)
    if as_json:
        print(dumps(found.to_json()), end="")
    else:
        for sentence in found.answer:
            print(printable(sentence))
        print(f"\n{found.to_terminal()}", end="")
    for problem in found.problems:
        remark(f"steppe: {problem}")


@import_app.command("domainbed")
def import_domainbed(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of DomainBed runs.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Output folder.")],
) -> None:
    """Convert DomainBed's output folders to runs that 'steppe report' reads."""
    from steppe import reports

    imported = reports.import_domainbed(source, target)
    for problem in imported.problems:
        remark(f"steppe: {problem}")
    show = command("steppe", "report", target)
    print(printable(f"{target}: imported {imported.n:,} runs; see them with: {show}"))
