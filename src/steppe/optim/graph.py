"""Contexts for losses that are differentiated twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_warned = False


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Disable code without second derivatives: compiled code and fast attention kernels."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def building_graph() -> Iterator[None]:
    """Make the passes inside twice differentiable, and silence torch's warning about them.

    Torch warns that ``backward(create_graph=True)`` creates a reference cycle. The optimizer breaks
    it: no `.grad` keeps a graph after the step. Torch warns once per process, so only the first
    pass needs the filter; each use of it makes Python show other warnings again.
    """
    global _warned
    with twice_differentiable():
        if _warned:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
            yield
    _warned = True
