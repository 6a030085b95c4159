"""`steppe report`, and results of other programs for it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from steppe.durable import replace
from steppe.strangers import command, printable

from .common import Json, Plugins, remark, writable

Selection = Annotated[
    Literal["train-val", "leave-one-out", "oracle"],
    typer.Option(help="How a step and hyperparameters are chosen."),
]
import_app = typer.Typer(help="Results of other programs.")


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Sweeps, runs, or folders of runs.")
    ],
    selection: Selection = "train-val",
    form: Annotated[
        Literal["terminal", "markdown", "latex", "csv", "json", "html"],
        typer.Option("--format", help="What to write."),
    ] = "terminal",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Write it here instead of printing."),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Write the chosen configs as JSON."),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="Compare all methods with this one, such as sgd; may be repeated. "
            "Default: the best and the cheapest.",
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Make tables of many runs: the mean over trials of what the selection chooses."""
    from steppe import reports
    from steppe.reports.values import dumps

    title = printable(", ".join(str(path) for path in paths))
    asked = command("steppe", *sys.argv[1:])
    loaded = reports.load_runs(paths)
    made = reports.build_report(loaded, selection, asked, title, reference or ())
    text = reports.write(made, form)
    if out is not None:
        replace(out, text.encode())
        remark(f"{out}: {len(made.selected.runs):,} runs")
    else:
        shown = printable(text) if form == "csv" else text  # the others escape names themselves
        print(shown, end="" if text.endswith("\n") else "\n")
    if best is not None:
        replace(best, dumps(made.best).encode())
    for problem in made.problems:
        remark(f"steppe: {problem}")


def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Two or more runs or sweeps; the first is the "
            "one that the others are compared with.",
        ),
    ],
    selection: Selection = "train-val",
    as_json: Json = False,
) -> None:
    """Compare runs or sweeps: paired differences where targets and trial seeds are the same."""
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
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder with DomainBed's runs.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where steppe's are written.")],
) -> None:
    """Read DomainBed's output folders, so that 'steppe report' can make tables of them."""
    from steppe import reports

    imported = reports.import_domainbed(source, target)
    for problem in imported.problems:
        remark(f"steppe: {problem}")
    show = command("steppe", "report", target)
    print(printable(f"{target}: {imported.n:,} runs; see them with: {show}"))
