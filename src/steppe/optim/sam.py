"""Sharpness-Aware Minimization (Foret et al., ICLR 2021) and ASAM (Kwon et al., ICML 2021)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO

from . import notices, vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk

NAMES = re.compile(r"Norm(Act|Fp32|Gated|Tlu)?(\dd\w*)?$")
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@register_optimizer(
    "sam",
    citation="Foret et al., Sharpness-Aware Minimization, ICLR 2021",
    passes=2,
    radii=("rho",),
    order=0,
)
@register_optimizer(
    "sam-on",
    citation="Mueller et al., Normalization Layers Are All That Sharpness-Aware Minimization "
    "Needs, NeurIPS 2023",
    summary="SAM that perturbs normalization layers only.",
    passes=2,
    radii=("rho",),
    order=0,
    fixed={"only": "norm"},
)
class SAM(FlatnessOptimizer):
    r"""Steps along the gradient at the (approximately) worst point within `rho`.

    The base optimizer gets $g_1 = \nabla L(\theta + \rho\, g_0 / (\lVert g_0 \rVert + \xi))$. With
    ``adaptive=True`` it is [`ASAM`][steppe.optim.ASAM], whose useful radii are about ten times
    larger.

    Two passes; one when ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number, or a callable from the step (counted from 1).
        adaptive: scale the perturbation by the weights (ASAM).
        eta: added to the size of each weight when adaptive; the ASAM paper uses 0.01, most
            implementations 0.
        only: ``"norm"`` perturbs the weights and biases of normalization layers alone (SAM-ON). The
            norm of the gradient is then theirs. Needs `model`.

    Examples:
        >>> import torch
        >>> from steppe.optim import SAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = SAM(torch.optim.SGD([w], lr=1.0), rho=0.5)
        >>> def closure():
        ...     loss = 0.5 * (w * w).sum()  # its gradient is w
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item()  # the loss at the unperturbed weights
        12.5
        >>> [round(x, 4) for x in w.tolist()]  # w - (w + 0.5 w / |w|)
        [-0.3, -0.4]
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        adaptive: bool = False,
        eta: Hyper = 0.0,
        only: str | None = None,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        if eta != 0 and not adaptive:
            raise ValueError(f"eta={eta} has no effect without adaptive=True (ASAM)")
        if only is not None:
            model = (model,) if isinstance(model, nn.Module) else tuple(model or ())
            check_only(only, model)
        self.adaptive, self.only = adaptive, only
        hyper: dict[str, Hyper] = {"rho": rho, "eta": eta} if adaptive else {"rho": rho}
        super().__init__(base, hyper, model=model, **options)
        if self.perturbed is not None and self.perturbed.isdisjoint(self.parameters()):
            notices.tell(
                "only='norm': none of this SAM's parameters belongs to a normalization layer, so "
                f"its steps are those of {type(base).__name__}"
            )

    def _reset(self) -> None:
        super()._reset()
        self._chosen: tuple[object, frozenset[Tensor]] | None = None

    @property
    def perturbed(self) -> frozenset[Tensor] | None:
        if self.only is None:
            return None
        if self._chosen is None or self._chosen[0] is not self.models:
            self._chosen = self.models, frozenset(norm_parameters(self.models))
        return self._chosen[1]

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        chosen = self.perturbed
        nothing = chosen is not None and chosen.isdisjoint(self.parameters())
        if nothing or all(c["rho"] == 0 for c in coefficients):
            return PLAIN
        return ADAPTIVE_VISITS if self.adaptive else VISITS


def check_only(only: str, models: tuple[nn.Module, ...]) -> None:
    if only != "norm":
        raise ValueError(f"only must be 'norm' or None, got {only!r}")
    if not models:
        raise ValueError(
            "only='norm' needs the model to find normalization layers: pass model=model"
        )
    if not any(True for _ in norm_parameters(models)):
        raise ValueError("only='norm': the model has no normalization layer with weights")


def norm_parameters(models: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """The weights and biases of normalization layers."""
    for model in models:
        for module in model.modules():
            if _normalizes(module):
                yield from module.parameters(recurse=False)


def _normalizes(module: nn.Module) -> bool:
    """Whether a module is a normalization layer: torch's, or another library's by its name.

    LlamaRMSNorm and timm's EvoNorm2dB0 are; NormalizedLinear and NormFreeBlock are not.
    """
    if isinstance(module, NORMS):
        return True
    own = module.parameters(recurse=False)
    vectors_only = all(p.numel() == max(p.shape, default=1) for p in own)
    return vectors_only and NAMES.search(type(module).__name__) is not None


def _after_g0(w: Walk, g0: Vector) -> Held:
    w.climb(g0, "rho")
    return ()


def _after_g0_adaptive(w: Walk, g0: Vector) -> Held:
    lengths = []
    for span in w.spans:
        rho, eta = span.coefficients["rho"], span.coefficients["eta"]
        if rho == 0:
            continue
        for theta, g in vectors.blocks(w.theta[span.tensors], g0[span.tensors]):
            T = list(torch._foreach_abs(theta))
            torch._foreach_add_(T, eta)
            torch._foreach_mul_(g, T)
            lengths.append(vectors.lengths(g))
            torch._foreach_mul_(g, T)
    w.climb(g0, "rho", norm=w.joined(lengths))  # along T^2 g0, whose length counts as |T g0|
    return ()


VISITS = (Visit(_after_g0), *PLAIN)  # the gradient at the second point is the direction
ADAPTIVE_VISITS = (Visit(_after_g0_adaptive), *PLAIN)
