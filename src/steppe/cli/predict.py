"""`steppe predict`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from steppe.durable import replace
from steppe.errors import UserError
from steppe.strangers import printable

from .common import Chosen, Device, Json, remark, talk, writable

if TYPE_CHECKING:
    from steppe.console import Meter
    from steppe.training import Prediction, TrainedModel

_EVERY = 64
"""Images between progress updates: updating for every image would cost more than the image."""


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES", help="Image files, or folders of images."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=writable,
            help="Output file: JSON if it ends in .json, otherwise CSV (default: CSV to stdout).",
        ),
    ] = None,
    which: Chosen = None,
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that read images (default: one per core on a GPU, none on a CPU).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the classes of unlabeled images.

    Writes one row per image: the file, the most likely class, its probability, and the model's
    training domains. Unreadable files are reported on stderr and skipped; the exit code is then 1.
    """
    from steppe.console import Meter
    from steppe.training import find_images, load_model, predict_images
    from steppe.training.progress import weights

    if as_json and out is not None and out.suffix.lower() != ".json":
        raise UserError(
            f"--json writes JSON, but --out {out} does not end in .json: drop --json or "
            "rename the file"
        )
    as_json = as_json or (out is not None and out.suffix.lower() == ".json")
    files = find_images(images)
    console = talk()
    model = load_model(run, which, device)
    used = weights(which, [(model.which, model.step)])
    remark(f"{run}: {used}, trained on {', '.join(model.trained_on)}")
    # Rows on a terminal show the progress, and a bar would cut through them.
    rows_shown = out is None and not as_json and sys.stdout.isatty()
    to = io.StringIO() if out is not None else sys.stdout  # before the bar redirects sys.stdout
    with Meter("predicting", len(files), console=None if rows_shown else console) as meter:
        found = predict_images(model, files, batch_size=batch_size, workers=workers)
        watched = _watched(found, meter, len(files))
        unreadable = (_write_json if as_json else _write_csv)(model, watched, to)
    if isinstance(to, io.StringIO) and out is not None:
        replace(out, to.getvalue().encode(errors="surrogateescape"))
    if unreadable:
        remark(f"{unreadable} of {len(files)} images could not be read")
        raise typer.Exit(1)


def _watched(found: Iterable[Prediction], meter: Meter, total: int) -> Iterator[Prediction]:
    """Update the progress, and report unreadable files."""
    for done, one in enumerate(found, start=1):
        if one.problem is not None:
            remark(one.problem)
        if done % _EVERY == 0 or done == total:
            meter.update(done)
        yield one


def _write_csv(model: TrainedModel, found: Iterable[Prediction], to: TextIO) -> int:
    """Write each prediction as it arrives; return the number of unreadable files."""
    # A terminal would interpret control codes in a file's name; a file keeps the name unchanged.
    escaped = str if isinstance(to, io.StringIO) else printable
    writer = csv.writer(to, lineterminator="\n")
    writer.writerow(("file", "class", "probability", "trained_on"))
    unreadable, domains = 0, escaped(";".join(model.trained_on))
    for one in found:
        if one.problem is None:
            row = (escaped(one.file), escaped(one.label), f"{one.probability:.6f}", domains)
            writer.writerow(row)
        else:
            unreadable += 1
    return unreadable


def _write_json(model: TrainedModel, found: Iterable[Prediction], to: TextIO) -> int:
    every = list(found)
    unreadable = [{"file": p.file, "problem": p.problem} for p in every if p.problem is not None]
    facts = {
        "which": model.which,
        "step": model.step,
        "trained_on": model.trained_on,
        "classes": model.classes,
        "predictions": [
            {"file": p.file, "class": p.label, "probability": p.probability}
            for p in every
            if p.problem is None
        ],
        "unreadable": unreadable,
    }
    print(json.dumps(facts, indent=2), file=to)
    return len(unreadable)
