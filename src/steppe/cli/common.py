"""Options and helpers that several commands share."""

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
    """Finds out before the work, not after it, whether its result can be stored.

    Makes the folder, and leaves the file as it is: it is written when there is something to write.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # A plain file is replaced by a rename, for which its folder counts; others are written to.
        plain = path.is_file() or not path.exists()
        needed = Path(os.path.realpath(path)).parent if plain else path
        if not os.access(needed, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
Root = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The data folder: $STEPPE_DATA or ./data.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        callback=load_plugins,
        help="A module that registers something of your own, such as a dataset.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config: optimizer.rho=0.1."),
]
Which = Annotated[
    str,
    typer.Option(
        metavar="last|best|step:N",
        help="The weights after the last step, those validated best, or those after step N.",
    ),
]
Chosen = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="best|last|step:N",
        help="The weights validated best, those after the last step, or those after step N.",
        show_default="best, or last where a run has no best",
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")]


def remark(line: object) -> None:
    """Prints a line beside the results, which may be piped."""
    print(printable(line), file=sys.stderr)


def talk() -> Console:
    """What steppe logs goes to the terminal, above a progress bar if there is one."""
    from steppe.console import say, stderr

    console = stderr()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(console, self.format(record))

    # Of several processes, one talks; the others only when something is wrong.
    handler = Handler(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("steppe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return console
