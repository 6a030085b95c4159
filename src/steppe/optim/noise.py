"""Repeatable noise, drawn from a generator that is reseeded for every place and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist


def seed_of(*place: int) -> int:
    """A seed for `torch.Generator` from whole numbers, such as an optimizer's seed and its step.

    Hashed, because neighboring seeds give similar streams on some devices.

    Examples:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(1, 0)
        (True, False)
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device, *place: int) -> torch.Generator:
    """A separate generator for a place, which leaves torch's global generators alone."""
    return torch.Generator(device).manual_seed(seed_of(*place))


def ranks(groups: Iterable[dist.ProcessGroup]) -> tuple[int, ...]:
    """This process's place among shards, so that each draws its own noise.

    Copies of a weight on several processes have the same place and draw the same.
    """
    return tuple(dist.get_rank(group) for group in groups)
