"""The command line: parses, calls, prints; no logic.

Exit codes: 0 success, 1 a missing extra or a bug, 2 a user's mistake, 130 interrupted.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

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
    """Compare the optimizers on built-in data, in under a minute on a laptop CPU."""
    from steppe.demo import run

    run()


_JSON = typer.Option("--json", help="Print the result as JSON, for programs.")


def _writable(path: Path | None) -> Path | None:
    """Finds out before the measurement, not after it, whether its result can be stored."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    return path


_SAVE = typer.Option(
    "--save", metavar="FILE", callback=_writable, help="Also store the result as JSON in FILE."
)
_DEVICE = typer.Option("--device", help="cpu, cuda, or a device such as cuda:1.")


@bench_app.command("optim")
def bench_optim(
    device: Annotated[str, _DEVICE] = "cpu",
    rounds: Annotated[int, typer.Option(min=2, help="Measurements of each contender.")] = 15,
    as_json: Annotated[bool, _JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Time the arithmetic between gradients against its floor and against another SAM."""
    from steppe.bench import optim, record

    result = optim.measure(record.device(device), rounds)
    _show(result, optim.tables(result), as_json, save)


@bench_app.command("fidelity")
def bench_fidelity(
    device: Annotated[str, _DEVICE] = "cpu",
    backbone: Annotated[
        str, typer.Option(help="'small', or a name in torchvision or timm.")
    ] = "small",
    weights: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Pretrained, as safetensors.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="A folder DOMAIN/CLASS/IMAGE to train on; built-in digits otherwise."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps before the measurement.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 96,
    batches: Annotated[int, typer.Option(min=1, help="Batches to average over.")] = 8,
    as_json: Annotated[bool, _JSON] = False,
    save: Annotated[Path | None, _SAVE] = None,
) -> None:
    """Compare FAD's differences of gradients in each precision with float64."""
    from steppe.bench import fidelity, record

    where = record.device(device)
    task = fidelity.prepare(where, backbone, weights, images, steps, batch, batches)
    result = fidelity.measure(task, fidelity.radii())
    _show(result, fidelity.tables(result), as_json, save)


def _show(result: dict[str, Any], tables: list[Any], as_json: bool, save: Path | None) -> None:
    if save is not None:
        from steppe.bench import record

        record.write(result, save)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(*tables, sep="\n")


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
