"""A briefly trained network, and batches to measure it on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import DeviceOptions, option, track
from images import check_folder
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import Network
from steppe.domains import Dataset, load
from steppe.domains.batches import View, read
from steppe.errors import UserError
from steppe.training.backbones import build_network

SMALL = "small-cnn"


@dataclass(frozen=True, kw_only=True)
class TaskOptions(DeviceOptions):
    backbone: str = option(SMALL, f"{SMALL}, or any name that 'steppe train' accepts.")
    steps: int = option(300, "Training steps before the measurement.", min=0)
    batch: int = option(96, "Images per batch.", min=1)
    batches: int = option(8, "Batches to measure on.", min=1)


@dataclass(frozen=True)
class Task:
    model: Network
    batches: list[tuple[Tensor, Tensor]]
    about: dict[str, Any]  # backbone, data and steps, for the record

    @property
    def device(self) -> torch.device:
        return self.batches[0][0].device


def prepare(options: TaskOptions, images: Path | None = None, weights: Path | None = None) -> Task:
    torch.manual_seed(0)
    device, backbone, steps = options.where, options.backbone, options.steps
    if (backbone == SMALL) != (images is None):
        raise UserError(
            f"backbone {SMALL!r} takes the built-in digits, and all others take color images: "
            "pass both --backbone and --images FOLDER, or neither"
        )
    if weights is not None and images is None:
        raise UserError("--weights needs a pretrained backbone: also pass --backbone and --images")
    if images is not None:
        check_folder(images)
    dataset = load(images or "RotatedDigits", packed=False)
    spec = dataset.spec
    model = build_network(
        backbone,
        n_classes=len(dataset.classes),
        image_size=spec.image_size,
        channels=spec.channels,
        weights=str(weights or "none"),
        freeze_bn=weights is not None,  # keep pretrained statistics
    ).to(device)
    # Fine-tuning needs a smaller learning rate than training from scratch.
    lr = 0.01 if weights is None else 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    draw = _draws(dataset, model, options.batch, device)
    for _ in track(range(steps), f"training {backbone}"):
        x, y = next(draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    names = ", ".join(domain.name for domain in dataset.domains)
    data = "digits" if images is None else f"{images.name} ({names})"
    about = {"backbone": backbone, "data": data, "steps": steps}
    task = Task(model.eval(), [next(draw) for _ in range(options.batches)], about)
    x, y = task.batches[0]
    loss = F.cross_entropy(model(x), y).detach()
    if not loss.isfinite():
        raise UserError(f"{backbone} diverged within {steps} training steps (loss {loss.item()})")
    return task


def _draws(
    dataset: Dataset, model: Network, batch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(0)
    sizes = [len(domain) for domain in dataset.domains]
    view = View(dataset.spec.image_size, augment=False)
    while True:
        counts = rng.multinomial(batch, np.array(sizes) / sum(sizes))
        chosen = [rng.integers(n, size=k) for n, k in zip(sizes, counts, strict=True)]
        domains = zip(dataset.domains, chosen, strict=True)
        parts = [read(domain, which, view) for domain, which in domains if len(which)]
        x, y = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
        yield model.normalize(x).contiguous(), y
