r"""Merge finished networks in weight space: means of several, and lines between two.

With weights \(\theta_1, \ldots, \theta_k\), a soup (Wortsman et al., ICML 2022) is
\(\frac1k \sum_i \theta_i\); with the weights \(\theta_0\) before fine-tuning, WiSE-FT (Wortsman et
al., CVPR 2022) is \((1 - \alpha)\,\theta_0 + \alpha\,\theta_1\). Both are computed in float64 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

State = Mapping[str, Tensor]


class Soup:
    """The mean of networks that arrive one at a time, in one float64 buffer.

    Merging k equal networks gives the same bits. Tensors that are not averaged, such as counters,
    are those of the first network.

    Args:
        prefix: average only floating-point tensors whose names start with this.

    Examples:
        >>> import torch
        >>> soup = Soup()
        >>> soup.add({"w": torch.tensor([1.0])})
        >>> soup.mean({"w": torch.tensor([3.0])})["w"], soup.mean()["w"]
        (tensor([2.]), tensor([1.]))
    """

    def __init__(self, prefix: str = "") -> None:
        self.size = 0
        self._prefix = prefix
        self._first: State = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, state: State) -> None:
        chosen = _averaged(state, self._prefix)
        if not self.size:  # zeros would lose the sign of -0
            self._first = {name: v for name, v in state.items() if name not in chosen}
            self._sums = {name: value.double() for name, value in chosen.items()}
            self._dtypes = {name: value.dtype for name, value in chosen.items()}
        else:
            for name, total in self._sums.items():
                total += state[name]
        self.size += 1

    def mean(self, extra: State | None = None) -> dict[str, Tensor]:
        """The mean, or what it would be with one more network."""
        if not self.size:
            return dict(extra or {})
        n = self.size + (extra is not None)
        means = {
            name: ((total if extra is None else total + extra[name]) / n).to(self._dtypes[name])
            for name, total in self._sums.items()
        }
        return {**self._first, **means}


def between(start: State, end: State, alpha: float, prefix: str = "") -> dict[str, Tensor]:
    """Interpolate from `start` (`alpha` 0) to `end` (1); both ends are exact.

    Tensors that are not interpolated are those of `end`; `start` needs only the others.

    Examples:
        >>> import torch
        >>> start, end = {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}
        >>> between(start, end, 0.25)
        {'w': tensor([1.5000])}
    """
    if alpha == 1:
        return dict(end)
    chosen = _averaged(end, prefix)
    if alpha == 0:
        return {**end, **{name: start[name] for name in chosen}}
    mixed = {
        name: ((1 - alpha) * start[name].double() + alpha * value.double()).to(value.dtype)
        for name, value in chosen.items()
    }
    return {**end, **mixed}


def _averaged(state: State, prefix: str) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in state.items()
        if value.is_floating_point() and name.startswith(prefix)
    }
