"""Small problems in float64 that every optimizer is tried on, and the table of the methods."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from steppe.optim import (
    DISAM,
    DISAMFAD,
    DISAMGSAM,
    DISAMSAGM,
    FAD,
    GAM,
    GGAL,
    GSAM,
    MSAM,
    PGN,
    RWP,
    SAGM,
    SAM,
    WSAM,
    CFlat,
    FlatnessOptimizer,
    FriendlySAM,
    GAMExact,
    GAMRelease,
    LookSAM,
    VaSSO,
)
from tests.optim import reference, reference_successors as successors

LAM = 0.3  # weight of the variance in the ascent loss


@dataclass
class Problem:
    """A model with a fixed batch; the loss is drawn again under the same seed at every call."""

    model: nn.Module
    x: Tensor
    y: Tensor
    split: int | None = None  # first parameters that form a group of their own

    def to(self, device: torch.device) -> Problem:
        return replace(self, model=self.model.to(device), x=self.x.to(device), y=self.y.to(device))

    def loss(self, model: Callable[..., Tensor] | None = None, name: str = "main") -> Tensor:
        """The loss of this name; the two halves of the batch are its domains."""
        logits = (model or self.model)(self.x)
        losses = nn.functional.cross_entropy(logits, self.y, reduction="none").view(2, -1).mean(1)
        if name == "ascent":
            return losses.mean() - LAM * losses.var(correction=0)
        return losses.mean() if name == "main" else losses[int(name.removeprefix("domain:"))]

    def closure(self, opt: Any) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            loss = self.loss()
            loss.backward(create_graph=getattr(opt, "needs_graph", False))
            return loss

        return closure

    def groups(self, **first: Any) -> list[dict[str, Any]]:
        params = list(self.model.parameters())
        if self.split is None:
            return [{"params": params}]
        return [{"params": params[: self.split], **first}, {"params": params[self.split :]}]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def per_weight(self, first: float, rest: float) -> Tensor:
        """A flat vector with one value per group, for the reference."""
        sizes = [p.numel() for p in self.model.parameters()]
        n = sum(sizes[: self.split])
        values = [first] * n + [rest] * (sum(sizes) - n)
        return torch.tensor(values, dtype=torch.float64, device=self.x.device)

    def gradient(self, theta: Tensor, seed: int, name: str = "main") -> Tensor:
        """The gradient at any flat weights, under a seed, without a trace in the model."""
        names = [n for n, _ in self.model.named_parameters()]
        shapes = [p.shape for p in self.model.parameters()]
        parts = theta.split([s.numel() for s in shapes])
        point = {n: t.reshape(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        if not theta.requires_grad:
            point = {n: t.detach().requires_grad_() for n, t in point.items()}
        torch.manual_seed(seed)
        loss = self.loss(lambda x: functional_call(self.model, {**point, **buffers}, (x,)), name)
        grads = torch.autograd.grad(
            loss, list(point.values()), create_graph=theta.requires_grad, materialize_grads=True
        )
        return torch.cat([g.reshape(-1) for g in grads])


def mlp() -> Problem:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    return Problem(model, torch.randn(16, 6).double(), torch.randint(4, (16,)), split=2)


def conv() -> Problem:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.Linear(48, 3)
    ).double()
    return Problem(model, torch.randn(12, 2, 6, 6).double(), torch.randint(3, (12,)))


def dropout() -> Problem:
    torch.manual_seed(3)
    layers = nn.Linear(5, 12), nn.LayerNorm(12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 3)
    model = nn.Sequential(*layers).double()
    return Problem(model, torch.randn(20, 5).double(), torch.randint(3, (20,)))


PROBLEMS = {"mlp": mlp, "conv-batchnorm": conv, "dropout": dropout}


@dataclass(frozen=True)
class Method:
    """One row of the table: how to build it, what it costs, what it must compute."""

    make: Callable[..., FlatnessOptimizer]
    hyper: dict[str, Any]
    passes: int
    reference: Callable[..., Tensor] | None
    buffers: int  # owned parameter-sized buffers at the peak of a step
    reference_names: tuple[str, ...] = field(default=())
    remembers: int = 0  # vectors that live between steps
    stateful: bool = False  # its reference needs a `memory`
    pushes: bool = False  # it also moves the weights after the base's step
    every: int = 1  # only the first of so many steps takes all passes, the others one

    def passes_at(self, step: int) -> int:
        return self.passes if step % self.every == 0 else 1

    def __call__(self, base: torch.optim.Optimizer, **more: Any) -> FlatnessOptimizer:
        return self.make(base, **{**self.hyper, **more})

    def direction(self, grad: reference.Grad, theta: Tensor, **values: Any) -> Tensor:
        memory = values.pop("memory", {})
        hyper = {**self.hyper, **values}
        own = {"memory": memory} if self.stateful else {}
        assert self.reference is not None
        return self.reference(grad, theta, *(hyper[n] for n in self.reference_names), **own)


METHODS = {
    "fad": Method(
        FAD, {"rho": 0.1, "alpha": 0.3, "beta": 0.7}, 4, reference.fad, 2, ("rho", "alpha", "beta")
    ),
    "sam": Method(SAM, {"rho": 0.1}, 2, reference.sam, 1, ("rho",)),
    "asam": Method(
        SAM,
        {"rho": 0.5, "adaptive": True, "eta": 0.01},
        2,
        reference.asam,
        2,
        ("rho", "eta"),
    ),
    "gam": Method(GAM, {"rho": 0.1, "alpha": 0.6}, 4, reference.gam, 2, ("rho", "alpha")),
    "gam-exact": Method(
        GAMExact, {"rho": 0.1, "alpha": 0.6}, 2, reference.gam_exact, 4, ("rho", "alpha")
    ),
    "gam-release": Method(
        GAMRelease,
        {
            "grad_rho": 0.05,
            "grad_norm_rho": 0.2,
            "grad_beta_0": 0.4,
            "grad_beta_1": 0.7,
            "grad_gamma": 0.1,
        },
        4,
        reference.gam_release,
        3,
        ("grad_rho", "grad_norm_rho", "grad_beta_0", "grad_beta_1", "grad_gamma"),
    ),
    "gsam": Method(GSAM, {"rho": 0.1, "alpha": 0.3}, 2, successors.gsam, 2, ("rho", "alpha")),
    "sagm": Method(SAGM, {"rho": 0.1, "alpha": 0.05}, 2, successors.sagm, 2, ("rho", "alpha")),
    "c-flat": Method(CFlat, {"rho": 0.1, "lam": 0.4}, 4, successors.c_flat, 2, ("rho", "lam")),
    "pgn": Method(PGN, {"rho": 0.1, "alpha": 0.7}, 2, successors.pgn, 2, ("rho", "alpha")),
    "wsam": Method(WSAM, {"rho": 0.1, "gamma": 0.6}, 2, successors.wsam_decoupled, 2, pushes=True),
    "wsam-coupled": Method(
        WSAM,
        {"rho": 0.1, "gamma": 0.6, "decouple": False},
        2,
        successors.wsam_coupled,
        2,
        ("rho", "gamma"),
    ),
    "f-sam": Method(
        FriendlySAM,
        {"rho": 0.1, "sigma": 1.0, "lam": 0.7},
        2,
        successors.f_sam,
        2,
        ("rho", "sigma", "lam"),
        remembers=1,
        stateful=True,
    ),
    "vasso": Method(
        VaSSO,
        {"rho": 0.1, "tau": 0.4},
        2,
        successors.vasso,
        2,
        ("rho", "tau"),
        remembers=1,
        stateful=True,
    ),
    "looksam": Method(
        LookSAM,
        {"rho": 0.1, "k": 3, "alpha": 0.7},
        2,
        successors.looksam,
        2,
        ("rho", "k", "alpha"),
        remembers=1,
        stateful=True,
        every=3,
    ),
    "msam": Method(MSAM, {"rho": 0.5}, 1, successors.msam, 1, ("rho",), stateful=True),
    "rwp": Method(
        RWP, {"gamma": 0.05, "alpha": 0.4}, 2, successors.rwp, 2, ("gamma", "alpha"), stateful=True
    ),
}


NAMING = {  # they ask the closure for other losses
    "disam": Method(DISAM, {"rho": 0.1, "lam": LAM}, 2, reference.sam, 1, ("rho",)),
    "disam-gsam": Method(
        DISAMGSAM, {"rho": 0.1, "alpha": 0.3, "lam": LAM}, 2, successors.gsam, 2, ("rho", "alpha")
    ),
    "disam-sagm": Method(
        DISAMSAGM, {"rho": 0.1, "alpha": 0.05, "lam": LAM}, 2, successors.sagm, 2, ("rho", "alpha")
    ),
    "disam-fad": Method(
        DISAMFAD,
        {"rho": 0.1, "alpha": 0.3, "beta": 0.7, "lam": LAM},
        4,
        reference.fad,
        2,
        ("rho", "alpha", "beta"),
    ),
    "gga-l": Method(GGAL, {"gamma": 0.05, "domains": 2}, 3, None, 2),
}
ON_NORMS = {"sam-on": Method(SAM, {"rho": 0.1, "only": "norm"}, 2, None, 1)}
EVERY = {**METHODS, **NAMING, **ON_NORMS}
"""All methods, for closures that take the name of a loss, and models with a norm layer."""


DIRECTED = [name for name, method in METHODS.items() if not method.pushes]
"""Methods whose step is the base's along the direction."""


def named(each: Tensor, name: str) -> Tensor:
    """A loss by name, from those of the samples; every other sample is of the second domain.

    All are linear in the samples' losses, so that a batch may be divided.
    """
    domains = [each[i::2].mean() for i in range(2)]
    if name == "ascent":
        return 0.8 * domains[0] + 0.2 * domains[1]
    return each.mean() if name == "main" else domains[int(name.removeprefix("domain:"))]


def sgd(params: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, **options})


def train(problem: Problem, opt: Any, steps: int, first: int = 0) -> list[float]:
    """Runs steps with the draw of each fixed by its number; returns the losses."""
    losses = []
    for t in range(first, first + steps):
        torch.manual_seed(t)
        losses.append(float(opt.step(problem.closure(opt)).detach()))
    return losses


def twin(problem: Problem) -> Problem:
    return copy.deepcopy(problem)
