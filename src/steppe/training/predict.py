"""A trained model on image files without labels."""

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

from steppe.algorithms import Algorithm
from steppe.curvature.float32 import full_float32
from steppe.domains.augment import resize
from steppe.domains.batches import Drawn, Evaluation, Reading, View, read_ahead
from steppe.domains.dataset import Domain, Files, Pixels, UnreadableImage
from steppe.domains.folder import SUFFIXES, image_names
from steppe.domains.pool import cores
from steppe.errors import UserError

from .evaluation import BATCH
from .models import Seen, TrainedModel

log = logging.getLogger("steppe")
_SUFFIXES = (*SUFFIXES, ".gif")
"""Datasets leave .gif out, as torchvision and so DomainBed do."""


@dataclass(frozen=True)
class Prediction:
    """What a model makes of an image file.

    Attributes:
        file: its path.
        label: the most probable class; None if the file could not be read.
        probability: of that class: the softmax of the logits.
        problem: why the file could not be read; None if it could.
    """

    file: str
    label: str | None = None
    probability: float | None = None
    problem: str | None = None


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The image files that paths stand for: files as they are, folders with all images in them.

    Raises:
        UserError: there is nothing at a path, or no image in a folder.
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
            raise UserError(f"{path}: no such file or folder")
    return found


def predict_images(
    model: TrainedModel,
    files: Sequence[str | os.PathLike[str]],
    *,
    batch_size: int = BATCH,
    workers: int | None = None,
) -> Iterator[Prediction]:
    """Predict image files one after another, in order.

    The images are read as in evaluation, and a file that cannot be read has a `problem` instead of
    a label. Computed in full float32, on a GPU too.

    Args:
        model: the model, on the device that is to compute.
        files: image files; `find_images` finds those in a folder.
        batch_size: how many images the model sees at once.
        workers: processes that read images ahead; 0: this one (default: for a GPU as many as there
            are cores, for a CPU none).

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
    if model.channels not in (1, 3):
        raise UserError(f"the model takes {model.channels} channels, which no image file has")
    if type(model.algorithm).predict is not Algorithm.predict:
        log.warning(
            "%s looks at a batch as a whole: predictions depend on which images are in one",
            type(model.algorithm).__name__,
        )
    names, device = [os.fspath(file) for file in files], model.algorithm.network.mean.device
    images = Seen(Files(Path(), names), model.channels)
    domain = Domain("images", images, np.zeros(len(names), dtype=np.int64))
    plan = Evaluation(
        domain, np.arange(len(names)), View(model.image_size, augment=False), batch_size
    )
    if workers is None:  # on a CPU, readers would take the cores that compute
        workers = 0 if device.type == "cpu" else min(cores(), len(plan))
    reading = Reading(plan, partial(_read, shape=(model.image_size, model.channels)))
    before: _Asked | None = None
    read = read_ahead(reading, range(len(plan)), workers, device.type == "cuda")
    for number, (pixels, problems) in enumerate(read):
        chosen = names[number * batch_size : (number + 1) * batch_size]
        asked = _Asked(model, chosen, pixels, problems)
        # A GPU's answer is waited for when the next batch is on its way, so that it is never idle.
        if before is not None:
            yield from before.answer()
        before = asked
    if before is not None:
        yield from before.answer()


def _read(drawn: Sequence[Drawn], shape: tuple[int, int]) -> tuple[Tensor, list[str | None]]:
    """The images of a batch that can be read, resized; and of each, what is wrong with it."""
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


class _Asked:
    """A batch that the model was shown; on a GPU, it may still be looking."""

    def __init__(
        self, model: TrainedModel, files: list[str], pixels: Tensor, problems: list[str | None]
    ) -> None:
        self._files, self._problems, self._classes = files, problems, model.classes
        device = model.algorithm.network.mean.device
        self._found = torch.zeros(2, 0)
        self._done: torch.cuda.Event | None = None
        if len(pixels):
            with torch.no_grad(), full_float32(device):
                logits = model(pixels.to(device, non_blocking=True))
                labels = logits.argmax(1)  # not softmax's: it rounds close ones to equal
                chosen = logits.softmax(1).gather(1, labels[:, None])[:, 0]
            found = torch.stack([labels.double(), chosen.double()])
            self._found = found.to("cpu", non_blocking=True)
            if device.type == "cuda":
                self._done = torch.cuda.current_stream(device).record_event()

    def answer(self) -> Iterator[Prediction]:
        if self._done is not None:
            self._done.synchronize()
        answers = zip(*self._found.tolist(), strict=True)
        for file, problem in zip(self._files, self._problems, strict=True):
            if problem is None:
                label, probability = next(answers)
                yield Prediction(file, self._classes[int(label)], probability)
            else:
                yield Prediction(file, problem=problem)
