"""Algorithms by name, each with its options, their search distributions and its paper.

The table `_SPECS` is the only place that knows the names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steppe.errors import UserError, unknown
from steppe.optim.search import Choice, Distribution, Fixed, Hyperparameter, LogUniform, Uniform

from .algorithm import Algorithm
from .arm import ARM
from .cdann import CDANN
from .coral import CORAL
from .dann import DANN
from .erm import ERM
from .fishr import Fishr
from .groupdro import GroupDRO
from .irm import IRM
from .miro import MIRO
from .mixstyle import MixStyle
from .mixup import Mixup
from .mldg import MLDG
from .mmd import MMD
from .mtl import MTL
from .network import Network
from .rsc import RSC
from .sagnet import SagNet
from .vrex import VREx


@dataclass(frozen=True)
class Option:
    """One option of an algorithm.

    Attributes:
        default: what it is unless given; None: as the optimizer's option of that name. Where it is
            whole, only whole numbers are accepted.
        distribution: what a search draws it from; None: what it draws the optimizer's learning rate
            from.
        drawn_as: the name under which DomainBed seeds the draw.
        low: the smallest value that makes sense.
        high: the largest.
    """

    default: float | int | None
    distribution: Distribution | None
    drawn_as: str = ""
    low: float = 0.0
    high: float = math.inf

    def check(self, where: str, value: Any) -> None:
        """Refuses a value that makes no sense."""
        if value is None and self.default is None:
            return
        whole = isinstance(self.default, int)
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not self.low <= value <= self.high:
            kind = "a whole number" if whole else "a number"
            high = "" if math.isinf(self.high) else f" and at most {self.high:g}"
            raise UserError(f"{where}={value!r}: expected {kind}, at least {self.low:g}{high}")


@dataclass(frozen=True)
class AlgorithmSpec:
    """One entry of the registry.

    Attributes:
        name: what users call it.
        target: the class.
        citation: the paper it comes from.
        options: its options, by name: the keyword arguments of the class.
        min_domains: the number of source domains it needs.
        min_batch: the number of images of a domain it needs at once.
        linear: whether its loss is a mean over images, so that processes that share a batch compute
            what one would.
        run: what it asks of the run as a whole, where images are large: the batch size.
        drawn_as: names under which DomainBed seeds draws of the optimizer's options, where the
            algorithm changes them.
    """

    name: str
    target: type[Algorithm]
    citation: str
    options: Mapping[str, Option] = field(default_factory=dict)
    min_domains: int = 1
    min_batch: int = 1
    linear: bool = False
    run: Mapping[str, Hyperparameter] = field(default_factory=dict)
    drawn_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, float | int | None]:
        """Every option's default."""
        return {name: option.default for name, option in self.options.items()}

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuses options that it does not have, or values that make no sense."""
        for key, value in given.items():
            if key not in self.options:
                raise UserError(unknown(f"option for algorithm {self.name!r}:", key, self.options))
            self.options[key].check(f"algorithm {self.name!r}: {key}", value)

    def check_domains(self, n_domains: int) -> None:
        """Refuses to learn from so few source domains."""
        if n_domains < self.min_domains:
            raise UserError(
                f"algorithm {self.name!r} compares domains and needs at least {self.min_domains} "
                f"source domains, not {n_domains}: add a --source, or hold out fewer targets"
            )

    def check_batch(self, images: int) -> None:
        """Refuses to see so few images of a domain at once."""
        if images < self.min_batch:
            raise UserError(
                f"algorithm {self.name!r} needs at least {self.min_batch} images of each domain at "
                f"once, and batch_size over processes and accumulate leaves {images}: raise "
                "batch_size"
            )


def _penalty(default: float, low_exp: float, high_exp: float, drawn_as: str) -> Option:
    return Option(default, LogUniform(low_exp, high_exp), drawn_as)


def _fixed(default: float | int, low: float = 0.0, high: float = math.inf) -> Option:
    return Option(default, Fixed(default), low=low, high=high)


def _anneal(drawn_as: str) -> Option:
    return Option(500, LogUniform(0, 4, integer=True), drawn_as)


_DOMAIN_PENALTY = {"penalty": _penalty(1.0, -1, 1, "mmd_gamma")}
_ADVERSARIAL = {
    "penalty": _penalty(1.0, -2, 2, "lambda"),
    "d_steps": Option(1, LogUniform(0, 3, base=2.0, integer=True), "d_steps_per_g_step", low=1),
    "grad_penalty": Option(0.0, LogUniform(-2, 1), "grad_penalty"),
    "beta1": Option(0.5, Choice((0.0, 0.5)), "beta1", high=0.999999),
    "width": Option(256, LogUniform(6, 10, base=2.0, integer=True), "mlp_width", low=1),
    "depth": Option(3, Choice((3, 4, 5)), "mlp_depth", low=2),
    "dropout": Option(0.0, Choice((0.0, 0.1, 0.5)), "mlp_dropout", high=0.999999),
    "lr": Option(None, None, "lr_d"),
    "weight_decay": Option(None, LogUniform(-6, -2), "weight_decay_d"),
}
_GENERATOR = {"lr": "lr_g", "weight_decay": "weight_decay_g"}
_DROPPED = Uniform(0.0, 0.5)

_SPECS = (
    AlgorithmSpec(
        name="ERM",
        target=ERM,
        citation="Vapnik, Statistical Learning Theory, Wiley 1998",
        linear=True,
    ),
    AlgorithmSpec(
        name="IRM",
        target=IRM,
        citation="Arjovsky et al., Invariant Risk Minimization, arXiv 1907.02893",
        options={
            "penalty": _penalty(100.0, -1, 5, "irm_lambda"),
            "anneal_steps": _anneal("irm_penalty_anneal_iters"),
        },
        min_domains=2,
        min_batch=2,
    ),
    AlgorithmSpec(
        name="VREx",
        target=VREx,
        citation="Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, "
        "ICML 2021",
        options={
            "penalty": _penalty(10.0, -1, 5, "vrex_lambda"),
            "anneal_steps": _anneal("vrex_penalty_anneal_iters"),
        },
        min_domains=2,
    ),
    AlgorithmSpec(
        name="GroupDRO",
        target=GroupDRO,
        citation="Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, "
        "ICLR 2020",
        options={"eta": Option(0.01, LogUniform(-3, -1), "groupdro_eta")},
        min_domains=2,
    ),
    AlgorithmSpec(
        name="Mixup",
        target=Mixup,
        citation="Wang et al., Heterogeneous Domain Generalization via Domain Mixup, ICASSP 2020; "
        "Zhang et al., mixup, ICLR 2018",
        options={"alpha": Option(0.2, LogUniform(-1, 1), "mixup_alpha", low=0.05)},
        min_domains=2,
        linear=True,
    ),
    AlgorithmSpec(
        name="MLDG",
        target=MLDG,
        citation="Li et al., Learning to Generalize: Meta-Learning for Domain Generalization, "
        "AAAI 2018",
        options={
            "beta": Option(1.0, LogUniform(-1, 1), "mldg_beta"),
            "n_meta_test": Option(2, Choice((1, 2)), "n_meta_test", low=1),
            "inner_lr": _fixed(0.01),
        },
        min_domains=2,
    ),
    AlgorithmSpec(
        name="MMD",
        target=MMD,
        citation="Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018",
        options=_DOMAIN_PENALTY,
        min_domains=2,
    ),
    AlgorithmSpec(
        name="CORAL",
        target=CORAL,
        citation="Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, "
        "ECCV Workshops 2016",
        options=_DOMAIN_PENALTY,
        min_domains=2,
        min_batch=2,
    ),
    AlgorithmSpec(
        name="DANN",
        target=DANN,
        citation="Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016",
        options=_ADVERSARIAL,
        min_domains=2,
        linear=True,
        drawn_as=_GENERATOR,
    ),
    AlgorithmSpec(
        name="CDANN",
        target=CDANN,
        citation="Li et al., Deep Domain Generalization via Conditional Invariant Adversarial "
        "Networks, ECCV 2018",
        options=_ADVERSARIAL,
        min_domains=2,
        drawn_as=_GENERATOR,
    ),
    AlgorithmSpec(
        name="MTL",
        target=MTL,
        citation="Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021",
        options={"ema": Option(0.99, Choice((0.5, 0.9, 0.99, 1.0)), "mtl_ema", high=1.0)},
    ),
    AlgorithmSpec(
        name="SagNet",
        target=SagNet,
        citation="Nam et al., Reducing Domain Gap by Reducing Style Bias, CVPR 2021",
        options={"penalty": _penalty(0.1, -2, 1, "sag_w_adv")},
    ),
    AlgorithmSpec(
        name="ARM",
        target=ARM,
        citation="Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, "
        "NeurIPS 2021",
        options={"support": _fixed(8, low=1)},
        run={"batch_size": Hyperparameter(8, Fixed(8))},
    ),
    AlgorithmSpec(
        name="RSC",
        target=RSC,
        citation="Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020",
        options={
            "feature_drop": Option(1 / 3, _DROPPED, "rsc_f_drop_factor", high=1.0),
            "batch_drop": Option(1 / 3, _DROPPED, "rsc_b_drop_factor", high=1.0),
        },
    ),
    AlgorithmSpec(
        name="MixStyle",
        target=MixStyle,
        citation="Zhou et al., Domain Generalization with MixStyle, ICLR 2021",
        options={"p": _fixed(0.5, high=1.0), "alpha": _fixed(0.1, low=0.05)},
    ),
    AlgorithmSpec(
        name="MIRO",
        target=MIRO,
        citation="Cha et al., Domain Generalization by Mutual-Information Regularization with "
        "Pre-trained Models, ECCV 2022",
        options={
            "penalty": Option(0.1, Choice((0.01, 0.1, 1.0)), "miro_lambda"),
            "lr_factor": _fixed(10.0),
        },
        linear=True,
    ),
    AlgorithmSpec(
        name="Fishr",
        target=Fishr,
        citation="Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution "
        "Generalization, ICML 2022",
        options={
            "penalty": _penalty(1000.0, 1, 4, "lambda"),
            "anneal_steps": Option(1500, Uniform(0, 5000, integer=True), "penalty_anneal_iters"),
            "ema": Option(0.95, Uniform(0.9, 0.99), "ema", high=0.999999),
        },
        min_domains=2,
        min_batch=2,
    ),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}


def register_algorithm(spec: AlgorithmSpec) -> None:
    """Add an algorithm of your own, for a module named with ``--plugin``."""
    if spec.name.lower() in (name.lower() for name in _BY_NAME):
        raise UserError(f"algorithm {spec.name!r} is known already: choose another name")
    _BY_NAME[spec.name] = spec


def algorithm_names() -> tuple[str, ...]:
    """Return the names that `build_algorithm` knows.

    Examples:
        >>> algorithm_names()[:3]
        ('ERM', 'IRM', 'VREx')
    """
    return tuple(_BY_NAME)


def algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the entry of the registry for a name, in any case.

    Examples:
        >>> algorithm_spec("coral").options["penalty"].distribution
        10^U(-1, 1)
    """
    by_lower = {known.lower(): spec for known, spec in _BY_NAME.items()}
    try:
        return by_lower[name.lower()]
    except KeyError:
        raise UserError(unknown("algorithm", name, _BY_NAME)) from None


def build_algorithm(name: str, network: Network, n_domains: int, **options: Any) -> Algorithm:
    """Build an algorithm by name, around a network.

    Args:
        name: one of `algorithm_names()`, in any case.
        network: the network to train; some algorithms change it.
        n_domains: the number of source domains.
        **options: options of the algorithm; those not given have their defaults.
    """
    spec = algorithm_spec(name)
    spec.check(options)
    spec.check_domains(n_domains)
    return spec.target(network, n_domains, **{**spec.defaults, **options})
