"""Predict the classes of image files without labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steppe.curvature.float32 import full_float32
from steppe.domains.augment import resize
from steppe.domains.batches import Drawn, Evaluation, Reading, View, read_ahead
from steppe.domains.dataset import Domain, Files, Pixels, UnreadableImage
from steppe.domains.folder import SUFFIXES, image_names
from steppe.domains.pool import cores
from steppe.errors import UserError

from .evaluation import BATCH
from .models import Seen, TrainedModel, require_images

log = logging.getLogger("steppe")
_SUFFIXES = (*SUFFIXES, ".gif")
"""Datasets leave out .gif, like torchvision and therefore DomainBed."""


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for an image file.

    Attributes:
        file: the path.
        label: the most probable class; None if the file could not be read.
        probability: softmax probability of that class.
        problem: why the file could not be read, if so.
    """

    file: str
    label: str | None = None
    probability: float | None = None
    problem: str | None = None


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """List image files: paths to files as given, folders as all images below them.

    Raises:
        UserError: a path does not exist, or a folder has no images.
    """
    found: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = [str(path / name) for name in image_names(path, _SUFFIXES)]
            if not below:
                raise UserError(f"{path} has no images: expected files with {', '.join(_SUFFIXES)}")
            found += below
        elif os.path.lexists(path):
            found.append(str(path))
        else:
            raise UserError(f"{path} does not exist")
    return found


def predict_images(
    model: TrainedModel,
    files: Sequence[str | os.PathLike[str]],
    *,
    batch_size: int = BATCH,
    workers: int | None = None,
) -> Iterator[Prediction]:
    """Predict the classes of image files, in order.

    Images are preprocessed as in evaluation. Logits are computed in full float32, even on a GPU. A
    file that cannot be read gets a `problem` instead of a label.

    Args:
        model: the model, on the device to compute on.
        files: image files; `find_images` lists those in a folder.
        batch_size: images per batch.
        workers: processes that read images ahead; 0 reads in this process (default: one per core
            for a GPU, 0 for a CPU).

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> from steppe.training import load_model, make_config, train
        >>> folder = tempfile.mkdtemp()
        >>> config = make_config({"dataset": "RotatedDigits", "targets": "75", "steps": 2})
        >>> records = train(config, f"{folder}/run")
        >>> Image.new("L", (20, 20)).save(f"{folder}/new.png")
        >>> model = load_model(f"{folder}/run")
        >>> (found,) = predict_images(model, [f"{folder}/new.png"])
        >>> found.label in model.classes and 0.1 <= found.probability <= 1
        True
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    require_images(model)
    if model.algorithm.mixes_images():
        log.warning(
            "%s uses statistics of the batch: predictions depend on which images share a batch",
            type(model.algorithm).__name__,
        )
    names, device = [os.fspath(file) for file in files], model.algorithm.network.mean.device
    images = Seen(Files(Path(), names), model.channels)
    domain = Domain("images", images, np.zeros(len(names), dtype=np.int64))
    plan = Evaluation(
        domain, np.arange(len(names)), View(model.image_size, augment=False), batch_size
    )
    if workers is None:  # on a CPU, readers would compete with the model for cores
        workers = 0 if device.type == "cpu" else min(cores(), len(plan))
    reading = Reading(plan, partial(_read, shape=(model.image_size, model.channels)))
    pending: Iterator[Prediction] = iter(())
    read = read_ahead(reading, range(len(plan)), workers, device.type == "cuda")
    for number, (pixels, problems) in enumerate(read):
        chosen = names[number * batch_size : (number + 1) * batch_size]
        launched = _launch(model, chosen, pixels, problems)
        # Collect results only after launching the next batch, so that a GPU is never idle.
        yield from pending
        pending = launched
    yield from pending


def _read(drawn: Sequence[Drawn], shape: tuple[int, int]) -> tuple[Tensor, list[str | None]]:
    """Read and resize a batch; returns the readable images, and the problem of each image."""
    size, channels = shape
    pixels: list[Pixels] = []
    problems: list[str | None] = []
    for domain, chosen, _ in drawn:
        for index in chosen:
            try:
                pixels.append(resize(domain.images[index], size))
                problems.append(None)
            except UnreadableImage as error:
                problems.append(str(error))
    stacked = np.stack(pixels) if pixels else np.zeros((0, size, size, channels), np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2), problems


def _launch(
    model: TrainedModel, files: list[str], pixels: Tensor, problems: list[str | None]
) -> Iterator[Prediction]:
    """Start predicting a batch; iterating waits for the device."""
    device = model.algorithm.network.mean.device
    found = torch.zeros(2, 0)
    done: torch.cuda.Event | None = None
    if len(pixels):
        with torch.no_grad(), full_float32(device):
            logits = model(pixels.to(device, non_blocking=True))
            labels = logits.argmax(1)  # softmax rounds close logits to ties
            chosen = logits.softmax(1).gather(1, labels[:, None])[:, 0]
        found = torch.stack([labels.double(), chosen.double()]).to("cpu", non_blocking=True)
        if device.type == "cuda":
            done = torch.cuda.current_stream(device).record_event()

    def collect() -> Iterator[Prediction]:
        if done is not None:
            done.synchronize()
        answers = zip(*found.tolist(), strict=True)
        for file, problem in zip(files, problems, strict=True):
            if problem is None:
                label, probability = next(answers)
                yield Prediction(file, model.classes[int(label)], probability)
            else:
                yield Prediction(file, problem=problem)

    return collect()
