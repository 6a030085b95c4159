"""A computation on fixed tensors, captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARM_UP = 1
"""Calls before capture, which compile code and load kernels."""


class Replay(Generic[T]):
    """Calls a function that always reads the same tensors, from the second call on as a CUDA graph.

    Every replay overwrites the results of the last one.

    Args:
        function: the computation; it must neither read a value on the host nor draw random numbers.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> T:
        if self._calls < WARM_UP:
            self._calls += 1
            return self._function()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # "thread_local" lets other threads go on allocating.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        return self._result
