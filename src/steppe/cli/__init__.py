"""The command line: parses, calls, prints; no logic.

Exit codes: 0 success; 1 a run that failed, data with problems, a missing extra, or a bug; 2 a
user's mistake; 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from steppe import __version__
from steppe.errors import Interrupted, RunError, UserError
from steppe.strangers import printable

from .extras import missing

try:
    import rich  # noqa: F401  (typer runs without it, the commands do not)
    import typer
except ModuleNotFoundError as error:  # a plain `pip install steppe` brings torch and nothing else
    raise SystemExit(missing(error)) from None

from . import curvature, data, listing, predict, reports, reproduce, runs, sweep
from .suggest import Commands

app = typer.Typer(
    cls=Commands,
    help="Flatness-aware optimizers and a domain-generalization benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug is reported with a traceback that can be pasted
)


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


app.command()(reproduce.demo)
app.command("list")(listing.list_names)
app.command()(runs.train)
app.command()(runs.evaluate)
app.command()(predict.predict)
app.command()(runs.export)
app.command()(reports.report)
app.command()(reports.compare)
app.command()(reproduce.reproduce)
for name, group in (
    ("data", data.app),
    ("sweep", sweep.app),
    ("import", reports.import_app),
    ("curvature", curvature.app),
):
    app.add_typer(group, name=name, no_args_is_help=True)


def main() -> None:
    """Run the command line; the `steppe` script and `python -m steppe` call this."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _printed():
            app(prog_name="steppe")
    except UserError as error:
        _fail(str(error), code=2)
    except OSError as error:
        if error.filename is None:
            what = " ".join(["steppe", *sys.argv[1:2]])
            _fail(f"'{what}' stopped: {error.strerror or error}", code=1)
        _fail(f"{error.filename}: {error.strerror}", code=2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "steppe":
            raise
        sys.exit(missing(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Interrupted as error:
        sys.exit(error.code)
    except RunError as error:
        _fail(str(error), code=1)


@contextmanager
def _printed() -> Iterator[None]:
    """Has all output out when the block ends, and not only when Python does.

    A reader that has seen enough (``| head``) ends the command without a word.
    """
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python would try again to write what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(1)
            raise OSError(error.errno, error.strerror, "standard output") from error


def _fail(message: str, code: int) -> None:
    print(printable(f"steppe: {message}"), file=sys.stderr)
    sys.exit(code)
