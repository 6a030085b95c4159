"""The command line: parses arguments, calls the library, prints results.

Exit codes: 0 success; 1 a failed run, damaged data, a missing extra, or a bug; 2 a user error; 130
interrupted by Ctrl-C; 143 terminated by SIGTERM.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from steppe import __version__
from steppe.errors import Interrupted, RunError, UserError
from steppe.strangers import printable

from .extras import missing

try:
    import rich  # noqa: F401  (the commands need it, typer does not)
    import typer
except ModuleNotFoundError as error:  # a plain `pip install steppe` installs only torch
    raise SystemExit(missing(error)) from None

from . import (
    advise,
    curvature,
    data,
    listing,
    merge,
    predict,
    protocol,
    reports,
    reproduce,
    runs,
    study,
    sweep,
)
from .suggest import Commands

app = typer.Typer(
    cls=Commands,
    help="Flatness-aware optimizers and a domain-generalization benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # so that users can paste a bug's traceback
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
app.command()(merge.merge)
app.command()(advise.advise)
app.command()(reports.report)
app.command()(reports.compare)
app.command()(reproduce.reproduce)
for name, group in (
    ("data", data.app),
    ("sweep", sweep.app),
    ("study", study.app),
    ("protocol", protocol.app),
    ("import", reports.import_app),
    ("curvature", curvature.app),
):
    app.add_typer(group, name=name, no_args_is_help=True)


def main() -> None:
    """Run the command line; the `steppe` script and `python -m steppe` call this."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _printed(), _logged():
            app(prog_name="steppe")
    except UserError as error:
        _fail(str(error), code=2)
    except OSError as error:
        if error.filename is None:
            what = " ".join(["steppe", *sys.argv[1:2]])
            _fail(f"'{what}' failed: {error.strerror or error}", code=1)
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
def _logged() -> Iterator[None]:
    """Log the library's warnings to its caller, which is the command line, without a location."""
    shown = warnings.showwarning

    def log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        *where: Any,
        **more: Any,
    ) -> None:
        if filename == typer.main.__file__:
            logging.getLogger("steppe").warning("%s", message)
        else:
            shown(message, category, filename, *where, **more)

    warnings.showwarning = log
    try:
        yield
    finally:
        warnings.showwarning = shown


@contextmanager
def _printed() -> Iterator[None]:
    """Flush standard output at the end of the block, and exit silently if its reader is gone."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Otherwise Python would try to flush again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(1)
            raise OSError(error.errno, error.strerror, "standard output") from error


def _fail(message: str, code: int) -> None:
    print(printable(f"steppe: {message}"), file=sys.stderr)
    sys.exit(code)
