"""What a loss needs that is differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Computes without what has no second derivatives: compiled code, fast kernels of attention."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield
