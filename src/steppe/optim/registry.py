"""Optimizers by name, each with its tuned defaults and search distributions.

The table `_SPECS` is the only place that knows the names. Classes are imported when asked for, so
that an optimizer from another package costs nothing until then.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steppe.errors import UserError, unknown

from .search import (
    DEFAULT_SPACE,
    FROM_SCRATCH,
    PAPER_WEIGHT_DECAY,
    Choice,
    Fixed,
    Hyperparameter,
    LogUniform,
    Value,
    get_space,
)
from .wrapper import options_of

if TYPE_CHECKING:
    from .still import Models

_SGD = "torch.optim:SGD"


@dataclass(frozen=True)
class OptimizerSpec:
    """One entry of the registry.

    Attributes:
        name: what users call it.
        target: ``module:class``, imported when an optimizer is built.
        citation: the paper it comes from.
        passes: forward and backward passes in a step, with the default hyperparameters.
        lr: the learning rate for fine-tuning, in the search space `fair`.
        scratch_lr: its default for training from scratch, where that is not `FROM_SCRATCH` times as
            much; the range always is.
        weight_decay: in the search space `fair`.
        base: ``module:class`` of the optimizer inside, for those that wrap one.
        method: the hyperparameters of the method itself, the same in every space.
        radii: those of them that are lengths in weight space. A method with several passes and no
            radii here is trained in fp32: nothing says how exact its gradients must be.
        order: of the flatness it minimizes: 0 if the direction depends on g1 - g0 alone, 1 if it
            takes differences at perturbed weights too, which lose more to rounding.
        needs_graph: whether the closure must call ``backward(create_graph=True)``.
        fixed: options that are not the caller's to choose, because the equations checked in the
            tests hold only with these values.
        extra: the extra of steppe that installs the package it comes from.
    """

    name: str
    target: str
    citation: str
    passes: int
    lr: Hyperparameter
    scratch_lr: float | None = None
    weight_decay: Hyperparameter = PAPER_WEIGHT_DECAY
    base: str | None = None
    method: Mapping[str, Hyperparameter] = field(default_factory=dict)
    radii: tuple[str, ...] = ()
    order: int = 1
    needs_graph: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None

    def __post_init__(self) -> None:
        for radius in self.radii:
            if radius not in self.method:
                raise ValueError(f"optimizer {self.name!r}: radius {radius!r} is not in its method")

    @property
    def source(self) -> str:
        """The package that the class comes from: torch, pytorch_optimizer or steppe."""
        return self.target.partition(":")[0].partition(".")[0]

    def defaults(self, space: str = DEFAULT_SPACE, pretrained: bool = True) -> dict[str, Value]:
        """Return what `build` starts from: the defaults of a space, the tuned ones by default."""
        return {name: hyper.default for name, hyper in self.space(space, pretrained).items()}

    @property
    def options(self) -> tuple[str, ...]:
        """The names that `build` accepts, those of the method before those of its base."""
        own = [name for name in options_of(self._load(self.target)) if name not in self.fixed]
        inner = options_of(self._load(self.base)) if self.base else ()
        return tuple(dict.fromkeys((*own, *inner)))

    def space(
        self, space: str = DEFAULT_SPACE, pretrained: bool = True
    ) -> dict[str, Hyperparameter]:
        """Return the hyperparameters that a search draws, by name."""
        chosen = get_space(space, pretrained)
        common = {
            "lr": chosen.lr or (self.lr if pretrained else self._lr_from_scratch),
            "weight_decay": chosen.weight_decay or self.weight_decay,
        }
        if _SGD in (self.target, self.base):
            common["momentum"] = chosen.momentum
        return {**common, **self.method}

    @property
    def _lr_from_scratch(self) -> Hyperparameter:
        larger = self.lr.scaled(FROM_SCRATCH)
        return replace(larger, default=self.scratch_lr) if self.scratch_lr else larger

    def build(
        self,
        params: ParamsT,
        model: Models = None,
        *,
        pretrained: bool = True,
        **hparams: Any,
    ) -> Optimizer:
        """Build the optimizer; see `build_optimizer`."""
        valid = self.options
        for name in hparams:
            if name not in valid:
                raise UserError(unknown(f"option for optimizer {self.name!r}:", name, valid))
        chosen = {**self.defaults(pretrained=pretrained), **hparams}
        cls = self._load(self.target)
        if self.base is None:
            optimizer = cls(params, **chosen, **self.fixed)
        else:
            optimizer = cls.over(self._load(self.base))(params, model=model, **chosen)
        if not hasattr(optimizer, "needs_graph"):
            optimizer.needs_graph = self.needs_graph
        return cast(Optimizer, optimizer)

    def _load(self, target: str) -> Any:
        module, _, attribute = target.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if self.extra is None or error.name != self.source:
                raise
            raise ImportError(
                f"optimizer {self.name!r} comes from the package {self.source!r}, which is not "
                f"installed: pip install 'steppe[{self.extra}]'",
                name=error.name,
            ) from error
        if self.source == "pytorch_optimizer":
            copyreg.pickle(cls, _reduce)
        return cls


def _reduce(optimizer: Optimizer) -> tuple[Any, ...]:
    # torch copies and pickles an optimizer's state and groups only, but pytorch_optimizer's classes
    # keep options as attributes beside them and could not step after a copy.
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | None)}
    return copyreg.__newobj__, (type(optimizer),), {**plain, **optimizer.__getstate__()}  # type: ignore[attr-defined]


# The learning rates of the space `fair`, for fine-tuning; docs/guide/defaults.md has what they were
# measured against. Steps of the Adam family have the size of the learning rate whatever the
# gradient, so they share a range, the paper's own. SGD moves by the gradient itself and fine-tunes
# ResNets at 1e-3 to 1e-2. Yogi is between the two: its eps of 1e-3 outweighs small gradients only,
# and from 1e-3 on it learned PACS in none of twelve runs (docs/results/pacs.md). AdaHessian's step
# is Newton-like, with 1 the pure Newton step; the NICO++ authors' code multiplies its learning rate
# by 100.
_ADAM_LR = Hyperparameter(5e-5, LogUniform(-5, -3.5))
_SGD_LR = Hyperparameter(1e-3, LogUniform(-4, -2))
_YOGI_LR = Hyperparameter(1e-4, LogUniform(-5, -3))
_ADAHESSIAN_LR = Hyperparameter(1e-2, LogUniform(-3, -0.5))

_ADAM_FROM_SCRATCH = 3e-3  # with 1e-3 the Adam family is two points behind on Doodles

# Decoupled decay shrinks a weight by lr * weight_decay: the paper's 1e-4 at lr 5e-5 is below half a
# unit in float32's last place and does nothing. This is torch's default for AdamW.
_DECOUPLED = Hyperparameter(1e-2, LogUniform(-3, -1))

# Appendix B of the FAD paper prints what is searched but no default for rho, alpha and beta: the
# defaults below are ours. (It prints FAD's three sets under the name of GAM.)
_RHO = Choice((0.01, 0.05, 0.1, 0.2, 0.5, 1.0))
_SAM = {"rho": Hyperparameter(0.05, _RHO)}
_GAM = {
    "rho": Hyperparameter(0.05, _RHO),
    "alpha": Hyperparameter(0.1, Choice((0.1, 0.2, 0.5, *map(float, range(1, 11))))),
}
_FAD = {
    "rho": Hyperparameter(0.05, Choice((0.05, 0.1, 0.2, 0.5, 1.0, 2.0))),
    "alpha": Hyperparameter(0.5, Choice(tuple(i / 10 for i in range(1, 11)))),
    "beta": Hyperparameter(0.5, Choice((0.01, 0.05, 0.1, 0.2, 0.5, 1.0))),
}
# The preset of the authors' public code for ResNets on CIFAR-100; the radii are searched over the
# paper's set for rho, the rest is kept.
_GAM_RELEASE = {
    "grad_rho": Hyperparameter(0.02, _RHO),
    "grad_norm_rho": Hyperparameter(0.2, _RHO),
    "grad_beta_0": Hyperparameter(0.5, Fixed(0.5)),
    "grad_beta_1": Hyperparameter(0.6, Fixed(0.6)),
    "grad_gamma": Hyperparameter(0.03, Fixed(0.03)),
}

_GAM_CITATION = "Zhang et al., Gradient Norm Aware Minimization, CVPR 2023"

_SPECS = (
    OptimizerSpec(
        name="adam",
        target="torch.optim:Adam",
        citation="Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015",
        passes=1,
        lr=_ADAM_LR,
        scratch_lr=_ADAM_FROM_SCRATCH,
    ),
    OptimizerSpec(
        name="adamw",
        target="torch.optim:AdamW",
        citation="Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019",
        passes=1,
        lr=_ADAM_LR,
        scratch_lr=_ADAM_FROM_SCRATCH,
        weight_decay=_DECOUPLED,
    ),
    OptimizerSpec(
        name="sgd",
        target=_SGD,
        citation="Nesterov, A method for solving the convex programming problem, 1983",
        passes=1,
        lr=_SGD_LR,
    ),
    # Ours: pytorch_optimizer's divides v by 1 - beta2^t under all of its options, Algorithm 2 of
    # the paper does not.
    OptimizerSpec(
        name="yogi",
        target="steppe.optim.yogi:Yogi",
        citation="Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018",
        passes=1,
        lr=_YOGI_LR,
    ),
    # pytorch_optimizer's: agrees with Algorithm 2 of the paper with these options. `eps` stays the
    # caller's: 1e-16 unless given.
    OptimizerSpec(
        name="adabelief",
        target="pytorch_optimizer:AdaBelief",
        citation="Zhuang et al., AdaBelief Optimizer, NeurIPS 2020",
        passes=1,
        lr=_ADAM_LR,
        scratch_lr=_ADAM_FROM_SCRATCH,
        weight_decay=_DECOUPLED,
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
    # Ours: pytorch_optimizer's has no spatial averaging, and leaves the graph on the gradients.
    OptimizerSpec(
        name="adahessian",
        target="steppe.optim.adahessian:AdaHessian",
        citation="Yao et al., ADAHESSIAN: An Adaptive Second Order Optimizer, AAAI 2021",
        passes=1,
        lr=_ADAHESSIAN_LR,
        needs_graph=True,
    ),
    OptimizerSpec(
        name="sam",
        target="steppe.optim.sam:SAM",
        base=_SGD,
        citation="Foret et al., Sharpness-Aware Minimization, ICLR 2021",
        passes=2,
        lr=_SGD_LR,
        method=_SAM,
        radii=("rho",),
        order=0,
    ),
    OptimizerSpec(
        name="gam",
        target="steppe.optim.gam:GAM",
        base=_SGD,
        citation=_GAM_CITATION + " (without Hessians, as in the FAD paper)",
        passes=4,
        lr=_SGD_LR,
        method=_GAM,
        radii=("rho",),
    ),
    OptimizerSpec(
        name="gam-exact",
        target="steppe.optim.gam_exact:GAMExact",
        base=_SGD,
        citation=_GAM_CITATION + " (with Hessian-vector products)",
        passes=2,
        lr=_SGD_LR,
        method=_GAM,
        radii=("rho",),
        needs_graph=True,
    ),
    OptimizerSpec(
        name="gam-release",
        target="steppe.optim.gam_release:GAMRelease",
        base=_SGD,
        citation=_GAM_CITATION + " (the authors' public code)",
        passes=4,
        lr=_SGD_LR,
        method=_GAM_RELEASE,
        radii=("grad_rho", "grad_norm_rho"),
    ),
    OptimizerSpec(
        name="fad",
        target="steppe.optim.fad:FAD",
        base=_SGD,
        citation="Zhang et al., Flatness-Aware Minimization for Domain Generalization, ICCV 2023",
        passes=4,
        lr=_SGD_LR,
        method=_FAD,
        radii=("rho",),
    ),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}


def optimizer_names() -> tuple[str, ...]:
    """Return the names that `build_optimizer` knows.

    Examples:
        >>> optimizer_names()[:3]
        ('adam', 'adamw', 'sgd')
    """
    return tuple(_BY_NAME)


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the entry of the registry for a name.

    Examples:
        >>> optimizer_spec("adamw").defaults()
        {'lr': 5e-05, 'weight_decay': 0.01}
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UserError(unknown("optimizer", name, _BY_NAME)) from None


def search_space(
    name: str, space: str = DEFAULT_SPACE, pretrained: bool = True
) -> dict[str, Hyperparameter]:
    """Return the default and the distribution of each hyperparameter of an optimizer.

    Args:
        name: the optimizer.
        space: `fair` (ours, tuned for each optimizer), `fad` (the paper's table) or `domainbed`
            (its own).
        pretrained: for fine-tuning a pretrained network, or for training from scratch.

    Examples:
        >>> search_space("sgd")["lr"]
        Hyperparameter(default=0.001, distribution=10^U(-4, -2))
    """
    return optimizer_spec(name).space(space, pretrained)


def build_optimizer(
    name: str,
    params: ParamsT,
    model: Models = None,
    *,
    pretrained: bool = True,
    **hparams: Any,
) -> Optimizer:
    """Build an optimizer by name.

    Hyperparameters that are not given have tuned defaults, which depend on the optimizer and on
    whether the network is pretrained. The flatness-aware optimizers wrap `torch.optim.SGD`, and
    take its options beside their own.

    Args:
        name: one of `optimizer_names()`.
        params: parameters, named parameters or parameter groups.
        model: passed to the flatness-aware optimizers, which keep its state still in all passes but
            the first; the others make no use of it.
        pretrained: fine-tune a pretrained network; False: train from scratch, with larger learning
            rates.
        **hparams: options of the optimizer; an unknown one is an error.

    Returns:
        An optimizer whose `needs_graph` says whether the closure must call
        ``backward(create_graph=True)``. (A copy of torch's own optimizers loses the attribute: read
        it with a default of False.)

    Examples:
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> optimizer = build_optimizer("sgd", model.parameters(), pretrained=False)
        >>> group = optimizer.param_groups[0]
        >>> group["lr"], group["momentum"], group["weight_decay"], optimizer.needs_graph
        (0.02, 0.9, 0.0001, False)
    """
    return optimizer_spec(name).build(params, model, pretrained=pretrained, **hparams)
