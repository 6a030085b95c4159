"""Search distributions, and the three spaces that defaults and draws come from.

A space holds a default and a range for each hyperparameter: `fair` is ours, tuned per optimizer,
and is what everything uses by default; `fad` is the table of the FAD paper (appendix B);
`domainbed` is DomainBed's own. Each has one version for fine-tuning and one for training from
scratch. What belongs to no single method is here; each method declares the rest in its own file.
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
    """The base to a power drawn from U(low_exp, high_exp), cut to an integer if asked.

    One call of ``rng.uniform`` and the same arithmetic as DomainBed, hence the same draws.

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
        """Whether `value` can be drawn."""
        return self.low <= value <= self.high and (not self.integer or value == int(value))

    def _value(self, exponent: float) -> Value:
        value = float(self.base**exponent)
        return int(value) if self.integer else value

    def __repr__(self) -> str:
        text = f"{self.base:g}^U({self.low_exp:g}, {self.high_exp:g})"
        return f"int {text}" if self.integer else text


@dataclass(frozen=True)
class Uniform:
    """A number from U(low, high), cut to an integer if asked; drawn as DomainBed does.

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
    """One of a few values, each as likely as the others.

    Examples:
        >>> Choice((0.0, 0.1, 0.5))
        {0.0, 0.1, 0.5}
    """

    values: tuple[Value, ...]

    def sample(self, rng: RandomState) -> Value:
        # The index is drawn, not the value: RandomState consumes the same random bits for both,
        # and the values keep their Python type.
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
        return self.value  # the generator is left as it is

    def contains(self, value: Value) -> bool:
        return value == self.value

    def __repr__(self) -> str:
        return str(self.value)


Distribution = LogUniform | Uniform | Choice | Fixed


@dataclass(frozen=True)
class Hyperparameter:
    """The default (trial 0 of a search) and the distribution of all other trials."""

    default: Value
    distribution: Distribution

    def scaled(self, factor: float) -> Hyperparameter:
        """Return it with its default and its logarithmic range multiplied by a factor.

        Examples:
            >>> Hyperparameter(1e-3, LogUniform(-4, -2)).scaled(10)
            Hyperparameter(default=0.01, distribution=10^U(-3, -1))
        """
        old = self.distribution
        if not isinstance(old, LogUniform):
            raise TypeError(f"only a LogUniform can be scaled, not {old}")
        shift = math.log(factor, old.base)
        moved = replace(old, low_exp=old.low_exp + shift, high_exp=old.high_exp + shift)
        return Hyperparameter(self.default * factor, moved)


@dataclass(frozen=True)
class Space:
    """What a space says about a run, whichever optimizer it uses.

    Attributes:
        lr: None where each optimizer has its own.
        momentum: for the optimizers that have one.
        weight_decay: None where an optimizer may have its own.
        batch_size: per training domain; a matter of the run, as is `dropout`.
    """

    lr: Hyperparameter | None
    momentum: Hyperparameter
    weight_decay: Hyperparameter | None
    batch_size: Hyperparameter
    dropout: Hyperparameter


class Spaces(NamedTuple):
    """A space by name: its version for fine-tuning, and the one for training from scratch."""

    name: str
    finetuning: Space
    from_scratch: Space


DEFAULT_SPACE = "fair"
FROM_SCRATCH = 20.0  # learning rates for training from scratch, over those for fine-tuning

PAPER_WEIGHT_DECAY = Hyperparameter(1e-4, LogUniform(-6, -3))
# Decoupled decay shrinks a weight by lr * weight_decay: the paper's 1e-4 at lr 5e-5 is below half a
# unit in float32's last place and does nothing. This is torch's default for AdamW.
DECOUPLED_DECAY = Hyperparameter(1e-2, LogUniform(-3, -1))

# Learning rates of the space `fair`, for fine-tuning; docs/guide/defaults.md has what they were
# measured against. Steps of the Adam family have the size of the learning rate whatever the
# gradient, so they share a range, the paper's own. SGD moves by the gradient itself and fine-tunes
# ResNets at 1e-3 to 1e-2.
ADAM_LR = Hyperparameter(5e-5, LogUniform(-5, -3.5))
ADAM_LR_FROM_SCRATCH = 3e-3  # with 1e-3 the Adam family is two points behind on Doodles
SGD_LR = Hyperparameter(1e-3, LogUniform(-4, -2))

# SAM's and GAM's in the FAD paper's appendix B, which prints what is searched but no defaults for
# rho, alpha and beta: those are ours. (It prints FAD's three sets under the name of GAM.)
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
# DomainBed's for images of 224 x 224 pixels. It knows only Adam, so the momentum is ours.
_DOMAINBED = replace(
    _PAPER,
    momentum=Hyperparameter(0.9, Fixed(0.9)),
    weight_decay=Hyperparameter(0.0, LogUniform(-6, -2)),
    dropout=Hyperparameter(0.0, Choice((0.0, 0.1, 0.5))),
)
# Ours. The paper gives every optimizer Adam's learning rates, at most 3.2e-4, which undertrains SGD
# within 5,000 steps; here each optimizer has its own, and the rest is the paper's.
_FAIR = replace(_PAPER, lr=None, weight_decay=None)

_SMALL_IMAGES = replace(  # what DomainBed has for them; their network has no dropout
    _DOMAINBED,
    lr=Hyperparameter(1e-3, LogUniform(-4.5, -2.5)),
    weight_decay=Hyperparameter(0.0, Fixed(0.0)),
    dropout=_NO_DROPOUT,
)

spaces = Registry(
    "search space",
    lambda: (
        Spaces("fair", _FAIR, _FAIR),
        Spaces("fad", _PAPER, replace(_PAPER, lr=ADAM_LR.scaled(FROM_SCRATCH))),
        Spaces("domainbed", _DOMAINBED, _SMALL_IMAGES),
    ),
)


def get_space(name: str, pretrained: bool = True) -> Space:
    """Return a search space by name: for fine-tuning, or for training from scratch."""
    return spaces[name].finetuning if pretrained else spaces[name].from_scratch


def run_space(space: str = DEFAULT_SPACE, pretrained: bool = True) -> dict[str, Hyperparameter]:
    """Return what a space draws for the run as a whole: batch size (per domain) and dropout.

    DomainBed narrows the batch size to 2^U(3, 5) on DomainNet; that is the dataset's to say.

    Examples:
        >>> run_space("domainbed")["dropout"]
        Hyperparameter(default=0.0, distribution={0.0, 0.1, 0.5})
    """
    chosen = get_space(space, pretrained)
    return {"batch_size": chosen.batch_size, "dropout": chosen.dropout}
