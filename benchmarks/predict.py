"""Device utilization while predicting image files: time of the model alone over the total time."""

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import torch
from harness import KNOWN, DeviceOptions, Result, command, option, spread
from images import image_folder, name_of

from steppe.algorithms import ERM
from steppe.curvature.float32 import full_float32
from steppe.training import TrainedModel, find_images, predict_images
from steppe.training.backbones import build_network

CLASSES = tuple("abcdefg")
_REPEATS = 20  # batches to time the model alone, after warm-up


@dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    images: Path | None = option(None, "Image folder (default: generated images).", metavar="DIR")
    backbone: str = option("resnet50", KNOWN)
    size: int = option(224, "Input height and width of the network.", min=8)
    batch: int = option(64, "Images per batch.", min=1)
    count: int = option(20_000, "Images to predict, repeating the folder as needed.", min=1)
    workers: int | None = option(None, "Processes that read images ahead.", min=0)
    rounds: int = option(3, "Number of measurements.", min=1)


def measure(options: Options) -> Result:
    device = options.where
    network = build_network(options.backbone, n_classes=len(CLASSES), image_size=options.size)
    model = TrainedModel(ERM(network, 1), CLASSES, options.size, step=0).to(device)
    with image_folder(options.images) as folder:
        found = find_images([folder])
        files = (found * (options.count // len(found) + 1))[: options.count]
        turns = {"predicting": partial(_round, model, files, options)}
        rounds = harness.take_turns(turns, options.rounds, "predicting")["predicting"]
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
    """Return seconds per image for the model alone, for all files, and after the first batch."""
    device = options.where
    pixels = torch.zeros(
        options.batch, options.size, options.size, 3, dtype=torch.uint8, device=device
    ).permute(0, 3, 1, 2)
    with torch.no_grad(), full_float32(device):
        harness.seconds(device, lambda: model(pixels), 3)
        alone = harness.seconds(device, lambda: model(pixels), _REPEATS) / options.batch
    began = time.perf_counter()
    predictions = predict_images(model, files, batch_size=options.batch, workers=options.workers)
    next(predictions)
    first = time.perf_counter()
    deque(predictions, maxlen=0)
    ended = time.perf_counter()
    return alone, ended - began, ended - first


main = command(Options, measure)
