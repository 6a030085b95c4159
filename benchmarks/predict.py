"""How busy predicting image files keeps a device.

The share of the time that the model needs for as many images that are on the device already, in all
and without the wait for the first answer. The model has random weights.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
from harness import KNOWN, DeviceOptions, Result, command, option, spread
from images import check_folder, name_of, write_doodles

from steppe.algorithms import ERM
from steppe.curvature.float32 import full_float32
from steppe.training import TrainedModel, find_images, predict_images
from steppe.training.backbones import build_network

CLASSES = tuple("abcdefg")
_REPEATS = 20  # batches that the model alone is timed for, after a few that are not


@dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    images: Path | None = option(
        None, "A folder of images (default: photograph-sized ones are made).", metavar="DIR"
    )
    backbone: str = option("resnet50", KNOWN)
    size: int = option(224, "The height and width of what the network sees.", min=8)
    batch: int = option(64, "Images that the model sees at once.", min=1)
    count: int = option(20_000, "Images to predict; those there are, again and again.", min=1)
    workers: int | None = option(None, "Processes that read images ahead.", min=0)
    rounds: int = option(3, "How often to measure.", min=1)


def measure(options: Options) -> Result:
    device = options.where
    network = build_network(options.backbone, n_classes=len(CLASSES), image_size=options.size)
    model = TrainedModel(ERM(network, 1), CLASSES, options.size, step=0).to(device)
    with ExitStack() as stack:
        folder = options.images
        if folder is None:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="steppe-bench-"))
            folder = Path(home) / "images"
            write_doodles(folder)
        else:
            check_folder(folder)
        found = find_images([folder])
        files = (found * (options.count // len(found) + 1))[: options.count]
        rounds = [
            _round(model, files, options)
            for _ in harness.track(range(options.rounds), "predicting")
        ]
    alone, whole, later = zip(*rounds, strict=True)
    return {
        "images": name_of(options.images),
        "backbone": options.backbone,
        "batch": options.batch,
        "count": len(files),
        "images per second": {
            "model alone": spread([1 / each for each in alone]),
            "predicted": spread([len(files) / each for each in whole]),
        },
        "share of the time that the device is busy": {
            "in all": spread([len(files) * a / w for a, w in zip(alone, whole, strict=True)]),
            "after the first answer": spread(
                [(len(files) - options.batch) * a / w for a, w in zip(alone, later, strict=True)]
            ),
        },
    }


def _round(model: TrainedModel, files: list[str], options: Options) -> tuple[float, float, float]:
    """Seconds of an image for the model alone, of all files, and of all after the first batch."""
    device = options.where
    pixels = torch.zeros(
        options.batch, options.size, options.size, 3, dtype=torch.uint8, device=device
    ).permute(0, 3, 1, 2)
    with torch.no_grad(), full_float32(device):
        harness.seconds(device, lambda: model(pixels), 3)
        alone = harness.seconds(device, lambda: model(pixels), _REPEATS) / options.batch
    began = first = time.perf_counter()
    predictions = predict_images(model, files, batch_size=options.batch, workers=options.workers)
    for number, _ in enumerate(predictions):
        if number == 0:
            first = time.perf_counter()
    ended = time.perf_counter()
    return alone, ended - began, ended - first


main = command(Options, measure)
