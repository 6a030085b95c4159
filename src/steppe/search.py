"""Search distributions, and the search spaces.

A space has a default and a distribution for each hyperparameter. `fair`, the default, is tuned per
optimizer; `fad` is the FAD paper's (appendix B); `domainbed` is DomainBed's; `yu2024` is that of
its successor DomainBed-v2. Each has one version for fine-tuning and one for training from scratch.
This file has the hyperparameters that methods share; each method declares its own in its file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from steppe.registry import Registry

if TYPE_CHECKING:
    from numpy.random import RandomState

Value = float | int


@dataclass(frozen=True)
class LogUniform:
    """The base raised to a power from U(low_exp, high_exp), optionally truncated to an integer.

    One call to ``rng.uniform`` and DomainBed's arithmetic give DomainBed's samples.

    Examples:
        >>> LogUniform(-5, -3.5)
        10^U(-5, -3.5)
        >>> LogUniform(3, 5.5, base=2, integer=True).contains(32)
        True
    """

    low_exp: float
    high_exp: float
    base: float = 10.0
    integer: bool = False

    @property
    def low(self) -> float:
        return self._value(self.low_exp)

    @property
    def high(self) -> float:
        return self._value(self.high_exp)

    def sample(self, rng: RandomState) -> Value:
        return self._value(float(rng.uniform(self.low_exp, self.high_exp)))

    def contains(self, value: Value) -> bool:
        """Whether `value` can be sampled."""
        return self.low <= value <= self.high and (not self.integer or value == int(value))

    def _value(self, exponent: float) -> Value:
        value = float(self.base**exponent)
        return int(value) if self.integer else value

    def __repr__(self) -> str:
        text = f"{self.base:g}^U({self.low_exp:g}, {self.high_exp:g})"
        return f"int {text}" if self.integer else text


@dataclass(frozen=True)
class Uniform:
    """A number from U(low, high), optionally truncated to an integer; sampled as in DomainBed.

    Examples:
        >>> Uniform(0, 0.5)
        U(0, 0.5)
    """

    low: float
    high: float
    integer: bool = False

    def sample(self, rng: RandomState) -> Value:
        value = float(rng.uniform(self.low, self.high))
        return int(value) if self.integer else value

    def contains(self, value: Value) -> bool:
        return self.low <= value <= self.high and (not self.integer or value == int(value))

    def __repr__(self) -> str:
        text = f"U({self.low:g}, {self.high:g})"
        return f"int {text}" if self.integer else text


@dataclass(frozen=True)
class Choice:
    """One of several values with equal probability.

    Examples:
        >>> Choice((0.0, 0.1, 0.5))
        {0.0, 0.1, 0.5}
    """

    values: tuple[Value, ...]

    def sample(self, rng: RandomState) -> Value:
        # Sampling the index consumes the same random bits as sampling the value, which would lose
        # its Python type.
        return self.values[int(rng.choice(len(self.values)))]

    def contains(self, value: Value) -> bool:
        return value in self.values

    def __repr__(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"


@dataclass(frozen=True)
class Fixed:
    """A value that the space does not search over."""

    value: Value

    def sample(self, rng: RandomState) -> Value:
        return self.value  # without advancing the generator

    def contains(self, value: Value) -> bool:
        return value == self.value

    def __repr__(self) -> str:
        return str(self.value)


Distribution = LogUniform | Uniform | Choice | Fixed


@dataclass(frozen=True)
class Hyperparameter:
    """The default (sample 0 of a search) and the distribution of all other samples."""

    default: Value
    distribution: Distribution

    def scaled(self, factor: float) -> Hyperparameter:
        """Multiply the default and the log-uniform range by a factor.

        Examples:
            >>> Hyperparameter(1e-3, LogUniform(-4, -2)).scaled(10)
            Hyperparameter(default=0.01, distribution=10^U(-3, -1))
        """
        old = self.distribution
        if not isinstance(old, LogUniform):
            raise TypeError(f"can only scale a LogUniform distribution, got {old}")
        shift = math.log(factor, old.base)
        moved = replace(old, low_exp=old.low_exp + shift, high_exp=old.high_exp + shift)
        return Hyperparameter(self.default * factor, moved)


@dataclass(frozen=True)
class Space:
    """The hyperparameters of a space that do not depend on the optimizer.

    Attributes:
        lr: None if each optimizer has its own.
        momentum: for optimizers that have one.
        weight_decay: None if an optimizer may have its own.
        batch_size: per training domain.
        dropout: before the classifier.
    """

    lr: Hyperparameter | None
    momentum: Hyperparameter
    weight_decay: Hyperparameter | None
    batch_size: Hyperparameter
    dropout: Hyperparameter


class Spaces(NamedTuple):
    """The two versions of a space."""

    name: str
    finetuning: Space
    from_scratch: Space


DEFAULT_SPACE = "fair"
FROM_SCRATCH = 20.0  # ratio of learning rates for training from scratch to those for fine-tuning

PAPER_WEIGHT_DECAY = Hyperparameter(1e-4, LogUniform(-6, -3))
# Decoupled decay shrinks a weight by lr * weight_decay: the paper's 1e-4 at lr 5e-5 is below half a
# unit in float32's last place and does nothing. This is torch's default for AdamW.
DECOUPLED_DECAY = Hyperparameter(1e-2, LogUniform(-3, -1))

# Learning rates of the space `fair` for fine-tuning, as measured in
# docs/guide/defaults-measured.md.
# Steps of the Adam family have the size of the learning rate whatever the gradient, so they share
# the paper's range. SGD's steps scale with the gradient; it fine-tunes ResNets at 1e-3 to 1e-2.
ADAM_LR = Hyperparameter(5e-5, LogUniform(-5, -3.5))
ADAM_LR_FROM_SCRATCH = 3e-3  # at 1e-3 the Adam family loses two points on Doodles
SGD_LR = Hyperparameter(1e-3, LogUniform(-4, -2))

# SAM's and GAM's distributions in the FAD paper's appendix B, which gives no defaults for rho,
# alpha and beta: those are ours. (It lists FAD's three sets under GAM's name.)
RHO = Choice((0.01, 0.05, 0.1, 0.2, 0.5, 1.0))
GAM_ALPHA = Choice((0.1, 0.2, 0.5, *map(float, range(1, 11))))

_NO_DROPOUT = Hyperparameter(0.0, Fixed(0.0))

# The FAD paper's appendix B, the table of search spaces.
_PAPER = Space(
    lr=ADAM_LR,
    momentum=Hyperparameter(0.9, LogUniform(-1, 0)),
    weight_decay=PAPER_WEIGHT_DECAY,
    batch_size=Hyperparameter(32, LogUniform(3, 5.5, base=2.0, integer=True)),
    dropout=_NO_DROPOUT,
)
# DomainBed's for 224 x 224 images. It has only Adam, so the momentum is ours.
_DOMAINBED = replace(
    _PAPER,
    momentum=Hyperparameter(0.9, Fixed(0.9)),
    weight_decay=Hyperparameter(0.0, LogUniform(-6, -2)),
    dropout=Hyperparameter(0.0, Choice((0.0, 0.1, 0.5))),
)
# Ours. The paper gives every optimizer Adam's learning rates, at most 3.2e-4, which undertrain SGD
# in 5,000 steps. Here each optimizer has its own; the rest is the paper's.
_FAIR = replace(_PAPER, lr=None, weight_decay=None)

_SMALL_IMAGES = replace(  # DomainBed's; its network for small images has no dropout
    _DOMAINBED,
    lr=Hyperparameter(1e-3, LogUniform(-4.5, -2.5)),
    weight_decay=Hyperparameter(0.0, Fixed(0.0)),
    dropout=_NO_DROPOUT,
)

# DomainBed-v2's (Yu et al., CVPR 2024; pretrain.json). It has no defaults: its samples are all
# drawn. It reuses the range whether or not the network is pretrained.
_YU_LR = Hyperparameter(5e-5, LogUniform(-5, math.log10(3e-4)))
_YU = replace(
    _DOMAINBED,
    lr=_YU_LR,
    batch_size=Hyperparameter(32, Fixed(32)),
    dropout=_NO_DROPOUT,
)

spaces = Registry(
    "search space",
    lambda: (
        Spaces("fair", _FAIR, _FAIR),
        Spaces("fad", _PAPER, replace(_PAPER, lr=ADAM_LR.scaled(FROM_SCRATCH))),
        Spaces("domainbed", _DOMAINBED, _SMALL_IMAGES),
        Spaces("yu2024", _YU, replace(_YU, lr=_YU_LR.scaled(FROM_SCRATCH))),
    ),
)


def get_space(name: str, pretrained: bool = True) -> Space:
    """Return a search space, for fine-tuning or for training from scratch."""
    return spaces[name].finetuning if pretrained else spaces[name].from_scratch


def run_space(space: str = DEFAULT_SPACE, pretrained: bool = True) -> dict[str, Hyperparameter]:
    """Return the hyperparameters of a run itself: batch size (per domain) and dropout.

    On DomainNet, DomainBed narrows the batch size to 2^U(3, 5), which the dataset declares.

    Examples:
        >>> run_space("domainbed")["dropout"]
        Hyperparameter(default=0.0, distribution={0.0, 0.1, 0.5})
    """
    chosen = get_space(space, pretrained)
    return {"batch_size": chosen.batch_size, "dropout": chosen.dropout}
