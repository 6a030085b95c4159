"""Options and helpers that several commands share."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

JSON = typer.Option("--json", help="Print the result as JSON, for programs.")
Which = Literal["last", "best"]
ROOT = typer.Option("--root", metavar="DIR", help="The data folder: $STEPPE_DATA or ./data.")
PLUGINS = typer.Option(
    "--plugin", help="A module that registers datasets or algorithms of your own."
)
BACKBONE = typer.Option(help="resnet18, resnet50, resnet50-v1, or any name in timm.")
WEIGHTS = typer.Option(help="imagenet, none, or a safetensors or checkpoint file.")
OVERRIDES = typer.Option("--set", metavar="KEY=VALUE", help="Any key of every run's config.")
WHICH = typer.Option("--which", help="The weights after the last step, or those validated best.")


def names(text: str) -> tuple[str, ...]:
    """Names that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def writable(path: Path | None) -> Path | None:
    """Finds out before the measurement, not after it, whether its result can be stored."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    return path


def talk() -> Console:
    """What steppe logs goes to the terminal, above a progress bar if there is one."""
    from rich.console import Console

    console = Console(stderr=True)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)

    # Of several processes, one talks; the others only when something is wrong.
    handler = Handler(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("steppe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return console
