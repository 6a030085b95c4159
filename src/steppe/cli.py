"""The command line: parses, calls, prints; no logic.

Exit codes: 0 success, 1 a missing extra or a bug, 2 a user's mistake, 130 interrupted.
"""

import sys
from typing import Annotated

from steppe import __version__
from steppe.errors import UserError

_EXTRAS = {"ray": "ray"}  # import name -> extra; everything else comes with `bench`


def _missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "a package").partition(".")[0]
    extra = _EXTRAS.get(package, "bench")
    return f"steppe: this command needs {package}: pip install 'steppe[{extra}]'"


try:
    import rich  # noqa: F401  (typer runs without it, the commands do not)
    import typer
except ModuleNotFoundError as error:  # a plain `pip install steppe` brings torch and nothing else
    raise SystemExit(_missing(error)) from None

app = typer.Typer(
    help="Flatness-aware optimizers and a domain-generalization benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug is reported with a traceback that can be pasted
)
bench_app = typer.Typer(help="Measure: every figure in the README comes from here.")
app.add_typer(bench_app, name="bench", no_args_is_help=True)


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


@app.command()
def demo() -> None:
    """Show the whole story on built-in data, in minutes on a laptop CPU."""
    from steppe.demo import run

    run()


def main() -> None:
    """Run the command line; the `steppe` script and `python -m steppe` call this."""
    try:
        app(prog_name="steppe")
    except UserError as error:
        _fail(str(error), code=2)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", code=2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "steppe":
            raise
        sys.exit(_missing(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> None:
    one_line = " ".join(message.split())
    print(f"steppe: {one_line}", file=sys.stderr)
    sys.exit(code)
