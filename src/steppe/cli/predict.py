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
"""Images between two looks at the progress: a look at every one would cost more than the image."""


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES...", help="Image files, or folders with images in them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=writable,
            help="Where to write the predictions: CSV, or JSON if it ends in .json.",
            show_default="CSV on the standard output",
        ),
    ] = None,
    which: Chosen = None,
    device: Device = "auto",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images that the model sees at once.")
    ] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that read images ahead.",
            show_default="for a GPU as many as there are cores, for a CPU none",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the classes of images without labels.

    A row for each image: its file, the most probable class, the probability, and the domains that
    the model was trained on. A file that cannot be read is named on the standard error stream; the
    others are predicted, and the exit code is 1.
    """
    from steppe.console import Meter
    from steppe.training import find_images, load_model, predict_images
    from steppe.training.progress import weights

    if as_json and out is not None and out.suffix.lower() != ".json":
        raise UserError(f"--json writes JSON, but --out {out} does not end in .json")
    as_json = as_json or (out is not None and out.suffix.lower() == ".json")
    files = find_images(images)
    console = talk()
    model = load_model(run, which, device)
    used = weights(which, [(model.which, model.step)])
    remark(f"{run}: {used}, trained on {', '.join(model.trained_on)}")
    # Rows that appear on a terminal are progress enough, and a bar would run through them.
    rows_shown = out is None and not as_json and sys.stdout.isatty()
    to = io.StringIO() if out is not None else sys.stdout  # a bar takes over sys.stdout
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
    """Shows how far predictions are, and names the files that cannot be read."""
    for done, one in enumerate(found, start=1):
        if one.problem is not None:
            remark(one.problem)
        if done % _EVERY == 0 or done == total:
            meter.update(done)
        yield one


def _write_csv(model: TrainedModel, found: Iterable[Prediction], to: TextIO) -> int:
    """Writes a row for each prediction as it comes; gives the number of files without one."""
    # A terminal obeys control codes in a file's name; a file keeps the name as it is.
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
