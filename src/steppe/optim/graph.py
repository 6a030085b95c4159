"""For losses that are differentiated twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_warned = False


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Computes without what has no second derivatives: compiled code, fast kernels of attention."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def building_graph() -> Iterator[None]:
    """Makes the passes inside twice differentiable, and silences torch's warning about them.

    Torch warns that ``backward(create_graph=True)`` makes a cycle between a parameter and its
    gradient, which the optimizer breaks itself: no `.grad` carries a graph when its step is over.
    Torch says it once per process, so the filter is needed for one pass only; keeping it would make
    Python forget which other warnings it has shown.
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
