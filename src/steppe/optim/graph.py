"""For optimizers that differentiate gradients (`needs_graph`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_warned = False


@contextmanager
def building_graph() -> Iterator[None]:
    """Silences torch's warning about ``backward(create_graph=True)`` in the passes inside.

    It warns of a cycle between a parameter and its gradient, which the optimizer breaks itself: no
    `.grad` carries a graph when its step is over. Torch says it once per process, so the filter is
    needed for one pass only; keeping it would make Python forget which other warnings it has shown.
    """
    global _warned
    if _warned:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        yield
    _warned = True
