"""Options and helpers that several commands share."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from steppe.console import Console

JSON = typer.Option("--json", help="Print the result as JSON, for programs.")
ROOT = typer.Option("--root", metavar="DIR", help="The data folder: $STEPPE_DATA or ./data.")
PLUGINS = typer.Option(
    "--plugin", help="A module that registers something of your own, such as a dataset."
)
BACKBONE = typer.Option(help="resnet18, resnet50, resnet50-v1, or any name in timm.")
WEIGHTS = typer.Option(help="imagenet, none, or a safetensors or checkpoint file.")
OVERRIDES = typer.Option("--set", metavar="KEY=VALUE", help="Any key of every run's config.")
WHICH = typer.Option(
    "--which",
    metavar="last|best|step:N",
    help="The weights after the last step, those validated best, or those after step N.",
)


def names(text: str) -> tuple[str, ...]:
    """Names that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def writable(path: Path | None) -> Path | None:
    """Finds out before the work, not after it, whether its result can be stored.

    Makes the folder, and leaves the file as it is: it is written when there is something to write.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise _refused(errno.EISDIR, path)
        # A plain file is replaced by a rename, for which its folder counts; others are written to.
        plain = path.is_file() or not path.exists()
        needed = Path(os.path.realpath(path)).parent if plain else path
        if not os.access(needed, os.W_OK):
            raise _refused(errno.EACCES, path)
    return path


def _refused(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


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
