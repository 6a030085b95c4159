"""Optimizers by name, each with its tuned defaults and search distributions.

steppe's own are declared in their files, those of torch and other packages here.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from steppe.axes import AxisSpec, declared, registrar
from steppe.errors import UserError, unknown
from steppe.registry import Registry
from steppe.search import (
    ADAM_LR,
    ADAM_LR_FROM_SCRATCH,
    DECOUPLED_DECAY,
    DEFAULT_SPACE,
    FROM_SCRATCH,
    PAPER_WEIGHT_DECAY,
    SGD_LR,
    Hyperparameter,
    LogUniform,
    Value,
    get_space,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

    from .still import Models

SGD = "torch.optim:SGD"
C = TypeVar("C", bound=type)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(AxisSpec):
    """One entry of the registry. Its `options` are the same in every search space.

    Attributes:
        passes: forward and backward passes per step, with the default hyperparameters; a mean if
            steps differ.
        hessian_products: Hessian-vector products per step, in addition to the passes.
        lr: the learning rate for fine-tuning, in the search space `fair`.
        scratch_lr: the default for training from scratch (default: `FROM_SCRATCH` times that of
            `lr`). The range is always scaled by `FROM_SCRATCH`.
        weight_decay: in the search space `fair`.
        base: ``module:class`` of the wrapped optimizer; None if there is none.
        radii: the options that are lengths in weight space. A method with several passes but no
            radii trains in fp32, because the precision that it needs is unknown.
        order: the order of flatness it minimizes. 0 if the direction depends only on g1 - g0; 1 if
            it also takes differences at perturbed weights, which lose more to rounding.
        needs_graph: whether the closure must call ``backward(create_graph=True)``.
        fixed: arguments that the caller cannot change, because the paper's equations hold only
            with these values.
        extra: steppe's extra that installs the package of the class.
    """

    kind: ClassVar[str] = "optimizer"

    passes: float
    hessian_products: int = 0
    lr: Hyperparameter = SGD_LR
    scratch_lr: float | None = None
    weight_decay: Hyperparameter = PAPER_WEIGHT_DECAY
    base: str | None = SGD
    radii: tuple[str, ...] = ()
    order: int = 1
    needs_graph: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None

    def __post_init__(self) -> None:
        for radius in self.radii:
            if radius not in self.options:
                raise ValueError(f"optimizer {self.name!r}: radius {radius!r} is not an option")
        if not isinstance(self.lr.distribution, LogUniform):  # scaled for training from scratch
            raise ValueError(
                f"optimizer {self.name!r}: the learning rate must be drawn from a LogUniform "
                f"distribution, got {self.lr.distribution}"
            )

    @property
    def source(self) -> str:
        """The package of the class, such as torch, pytorch_optimizer or steppe."""
        target = self.target if isinstance(self.target, str) else self.target.__module__
        return target.partition(":")[0].partition(".")[0]

    @property
    def cls(self) -> Any:
        try:
            found = super().cls
        except ModuleNotFoundError as error:
            if self.extra is None or error.name != self.source:
                raise
            raise ImportError(
                f"optimizer {self.name!r} comes from the package {self.source!r}, which is not "
                f"installed: pip install 'steppe[{self.extra}]'",
                name=error.name,
            ) from error
        if self.source == "pytorch_optimizer":
            copyreg.pickle(found, _reduce)
        return found

    def defaults(self, space: str = DEFAULT_SPACE, pretrained: bool = True) -> dict[str, Value]:
        """Return the default hyperparameters of a search space."""
        return {name: hyper.default for name, hyper in self.space(space, pretrained).items()}

    def space(
        self, space: str = DEFAULT_SPACE, pretrained: bool = True
    ) -> dict[str, Hyperparameter]:
        """Return the hyperparameters that a search draws, by name."""
        lr = self.lr
        if not pretrained:
            lr = lr.scaled(FROM_SCRATCH)
            lr = replace(lr, default=self.scratch_lr or lr.default)
        chosen = get_space(space, pretrained)
        drawn = {"lr": chosen.lr or lr, "weight_decay": chosen.weight_decay or self.weight_decay}
        if SGD in (self.target, self.base):
            drawn["momentum"] = chosen.momentum
        return drawn | {name: option.hyperparameter for name, option in self.options.items()}

    @property
    def keywords(self) -> tuple[str, ...]:
        """The options that `build` accepts: the method's, then its base's."""
        from .wrapper import options_of

        own = [name for name in options_of(self.cls) if name not in self.fixed]
        inner = options_of(self._base) if self.base else ()
        return tuple(dict.fromkeys((*own, *inner)))

    @property
    def _base(self) -> Any:
        return replace(self, target=self.base, base=None, extra=None).cls if self.base else None

    def check_names(self, given: Iterable[str]) -> None:
        """Refuse options that neither the method nor its base has."""
        for name in given:
            if name not in self.keywords:
                others = [spec.name for spec in optimizers.entries() if name in spec.options]
                owners = f". Optimizers with {name!r}: {', '.join(others)}" if others else ""
                known = unknown(f"option for optimizer {self.name!r}:", name, self.keywords)
                raise UserError(known + owners)

    def build(
        self, params: ParamsT, model: Models = None, *, pretrained: bool = True, **hparams: Any
    ) -> Optimizer:
        """Build the optimizer; see `build_optimizer`."""
        self.check_names(hparams)
        chosen = {**self.defaults(pretrained=pretrained), **hparams}
        if self.base is None:
            optimizer = self.cls(params, **chosen, **self.fixed)
        else:
            optimizer = self.cls.over(self._base)(params, model=model, **chosen, **self.fixed)
        if not hasattr(optimizer, "needs_graph"):
            optimizer.needs_graph = self.needs_graph
        return cast("Optimizer", optimizer)


def _reduce(optimizer: Optimizer) -> tuple[Any, ...]:
    # torch copies and pickles only an optimizer's state and groups, but pytorch_optimizer's classes
    # also keep options as attributes, without which a copy cannot step.
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | None)}
    return copyreg.__newobj__, (type(optimizer),), {**plain, **optimizer.__getstate__()}  # type: ignore[attr-defined]


_PLAIN = partial(OptimizerSpec, passes=1, base=None)
_ADAM = partial(_PLAIN, lr=ADAM_LR, scratch_lr=ADAM_LR_FROM_SCRATCH)
_FOREIGN = (
    _ADAM(
        name="adam",
        target="torch.optim:Adam",
        citation="Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015",
        summary="Steps scaled per weight by moments of the gradient.",
    ),
    _ADAM(
        name="adamw",
        target="torch.optim:AdamW",
        citation="Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019",
        summary="Adam with decoupled weight decay.",
        weight_decay=DECOUPLED_DECAY,
    ),
    _PLAIN(
        name="sgd",
        target=SGD,
        citation="Nesterov, A method for solving the convex programming problem, 1983",
        summary="Gradient descent with momentum.",
    ),
    # With these options it follows Algorithm 2 of the paper. `eps` (default: 1e-16) is not fixed.
    _ADAM(
        name="adabelief",
        target="pytorch_optimizer:AdaBelief",
        citation="Zhuang et al., AdaBelief Optimizer, NeurIPS 2020",
        summary="Adam with steps scaled by the gradient's deviation from its mean.",
        weight_decay=DECOUPLED_DECAY,
        fixed={
            "weight_decouple": True,
            "fixed_decay": False,
            "rectify": False,
            "n_sma_threshold": 5,
            "degenerated_to_sgd": True,
            "ams_bound": False,
        },
        extra="dg",
    ),
)


def _entries() -> Iterator[OptimizerSpec]:
    own = declared(OptimizerSpec, __package__, "register_optimizer")
    found = {spec.name: spec for spec in (*_FOREIGN, *own)}
    yield from (found.pop(name) for name in _ORDER)
    yield from found.values()


# The paper's order, for tables and lists; others follow by name.
_ORDER = (
    *("adam", "adamw", "sgd", "yogi", "adabelief", "adahessian"),
    *("sam", "asam", "gam", "gam-exact", "gam-release", "fad"),
)
optimizers = Registry("optimizer", _entries)


def register_optimizer(
    name: str, *, passes: float, citation: str = "", **facts: Any
) -> Callable[[C], C]:
    """Register your own optimizer: a class decorator, for a module that you load with ``--plugin``.

    Its hyperparameters are the constructor arguments annotated with `steppe.options.Option`. A
    class that wraps another optimizer, such as a `FlatnessOptimizer`, is built around SGD. For one
    that takes parameters itself, pass ``base=None`` and a learning rate, `lr`.

    Args:
        name: the name for users.
        passes: forward and backward passes per step.
        citation: the paper it comes from.
        **facts: other fields of `OptimizerSpec`.
    """
    facts |= {"passes": passes, "citation": citation}

    def decorate(cls: C) -> C:
        if "base" not in facts and not hasattr(cls, "over"):
            raise UserError(
                f"optimizer {name!r}: {cls.__name__} does not wrap another optimizer. Pass "
                "base=None and a learning rate, lr=Hyperparameter(...)"
            )
        return registrar(optimizers, OptimizerSpec, name, **facts)(cls)

    return decorate


def optimizer_names() -> tuple[str, ...]:
    """Return the names that `build_optimizer` knows.

    Examples:
        >>> optimizer_names()[:3]
        ('adam', 'adamw', 'sgd')
    """
    return tuple(optimizers)


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the registry entry for a name, ignoring case.

    Examples:
        >>> optimizer_spec("adamw").defaults()
        {'lr': 5e-05, 'weight_decay': 0.01}
    """
    return optimizers[name]


def search_space(
    name: str, space: str = DEFAULT_SPACE, pretrained: bool = True
) -> dict[str, Hyperparameter]:
    """Return the default and the distribution of each hyperparameter of an optimizer.

    Args:
        name: the optimizer.
        space: `fair` (steppe's, tuned per optimizer), `fad` (the paper's) or `domainbed`.
        pretrained: fine-tune a pretrained network; False: train from scratch.

    Examples:
        >>> search_space("sgd")["lr"]
        Hyperparameter(default=0.001, distribution=10^U(-4, -2))
    """
    return optimizers[name].space(space, pretrained)


def build_optimizer(
    name: str, params: ParamsT, model: Models = None, *, pretrained: bool = True, **hparams: Any
) -> Optimizer:
    """Build an optimizer by name.

    Missing hyperparameters get tuned defaults, which depend on the optimizer and on whether the
    network is pretrained. Flatness-aware optimizers wrap `torch.optim.SGD` and also accept its
    options.

    Args:
        name: one of `optimizer_names()`.
        params: parameters, named parameters or parameter groups.
        model: the module being trained. Flatness-aware optimizers restore its other state (such as
            batch-norm statistics) after all passes but the first; other optimizers ignore it.
        pretrained: fine-tune a pretrained network; False: train from scratch, with larger learning
            rates.
        **hparams: options of the optimizer. Unknown options raise an error.

    Returns:
        An optimizer whose `needs_graph` says whether the closure must call
        ``backward(create_graph=True)``. (Copies of torch's own optimizers lose the attribute, so
        read it with a default of False.)

    Examples:
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> optimizer = build_optimizer("sgd", model.parameters(), pretrained=False)
        >>> group = optimizer.param_groups[0]
        >>> group["lr"], group["momentum"], group["weight_decay"], optimizer.needs_graph
        (0.02, 0.9, 0.0001, False)
    """
    return optimizers[name].build(params, model, pretrained=pretrained, **hparams)
