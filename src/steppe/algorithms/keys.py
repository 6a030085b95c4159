"""Keys: embeddings by a momentum network, and a memory of past ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F


class Keys(nn.Module):
    """A momentum network, and the last keys that it gave in any process, first in, first out.

    Args:
        featurizer: starts the momentum network.
        embedding: a linear layer after it.
        size: the number of keys to remember.
        ema: decay of the moving average of weights and batch-norm statistics.
    """

    memory: Tensor
    labels: Tensor
    pointer: Tensor

    def __init__(self, featurizer: nn.Module, embedding: nn.Linear, size: int, ema: float) -> None:
        super().__init__()
        self.ema = ema
        self.featurizer = copy.deepcopy(featurizer).requires_grad_(False)
        self.embedding = copy.deepcopy(embedding).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(size, embedding.out_features))
        self.register_buffer("labels", torch.full((size,), -1))  # -1: empty
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return embed(self.embedding, self.featurizer(images))

    @torch.no_grad()
    def follow(self, featurizer: nn.Module, embedding: nn.Module) -> None:
        """Update the moving average."""
        mine, theirs = (self.featurizer, self.embedding), (featurizer, embedding)
        parameters = (list(chain(*(m.parameters() for m in of))) for of in (mine, theirs))
        self._lerp(*parameters)
        if statistics := _statistics(featurizer):
            # Processes share theirs only after the step.
            flat = _of_all_processes(torch.cat([s.flatten() for s in statistics])[None]).mean(0)
            shared = flat.split([s.numel() for s in statistics])
            now = [new.view_as(s) for new, s in zip(shared, statistics, strict=True)]
            self._lerp(_statistics(self.featurizer), now)

    def _lerp(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, 1 - self.ema)

    @torch.no_grad()
    def remember(self, keys: Tensor, labels: Tensor) -> None:
        """Replace the oldest keys by those of all processes, in the order of their ranks."""
        size = len(self.memory)
        keys, labels = (_of_all_processes(rows)[-size:] for rows in (keys, labels))
        places = (self.pointer + torch.arange(len(labels), device=labels.device)) % size
        self.memory[places], self.labels[places] = keys, labels
        self.pointer.copy_((self.pointer + len(labels)) % size)

    def train(self, mode: bool = True) -> Keys:
        super().train(mode)
        self.featurizer.eval()
        return self


def embed(layer: nn.Linear, features: Tensor) -> Tensor:
    """Apply a layer in full precision, and scale its output to length 1."""
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(layer(features.to(layer.weight.dtype)))


def draw_columns(allowed: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw allowed columns of each row with replacement, no more than are allowed there.

    Returns the columns, and whether each is among a row's allowed number.
    """
    counts = allowed.sum(1, keepdim=True)
    ranks = (uniforms * counts).long().minimum(counts - 1)  # a product may round up
    columns = torch.searchsorted(allowed.cumsum(1), ranks + 1)
    slots = torch.arange(uniforms.shape[1], device=uniforms.device)
    return columns.clamp(max=allowed.shape[1] - 1), slots < counts


def _statistics(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def _of_all_processes(rows: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)
