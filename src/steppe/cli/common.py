"""Options and helpers shared by several commands."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steppe.strangers import printable

if TYPE_CHECKING:
    from steppe.console import Console


def load_plugins(modules: list[str] | None) -> list[str] | None:
    from steppe.domains import import_plugins

    import_plugins(modules or ())
    return modules


def writable(path: Path | None) -> Path | None:
    """Check that a result can be stored before computing it; create its folder, not the file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # Replacing a regular file needs write access to its folder; other files are written to.
        plain = path.is_file() or not path.exists()
        needed = Path(os.path.realpath(path)).parent if plain else path
        if not os.access(needed, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Root = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Data folder (default: $STEPPE_DATA or ./data)."),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1, ...")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        callback=load_plugins,
        help="Module that registers your own datasets, optimizers or other entries; repeatable.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any config key, such as optimizer.rho=0.1; repeatable.",
    ),
]
Which = Annotated[
    str,
    typer.Option(
        metavar="last|best|step:N",
        help="Which weights: after the last step, best by validation, or after step N.",
    ),
]
Chosen = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="best|last|step:N",
        help="Which weights: best by validation, after the last step, or after step N (default: "
        "best, or last if the run has no best).",
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")]


def remark(line: object) -> None:
    """Print a line to stderr, so that results can be piped."""
    print(printable(line), file=sys.stderr)


def talk() -> Console:
    """Send steppe's log to the terminal, above any progress bar."""
    from steppe.console import say, stderr

    console = stderr()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(console, self.format(record))

    # Only the first of several processes reports progress; the others report errors.
    handler = Handler(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("steppe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return console
