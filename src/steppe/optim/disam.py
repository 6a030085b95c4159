"""Domain-Inspired Sharpness-Aware Minimization (Zhang et al., ICLR 2024), over four methods."""

from __future__ import annotations

import math
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from .engine import FlatnessOptimizer
from .fad import FAD
from .gsam import GSAM
from .registry import register_optimizer
from .sagm import SAGM
from .sam import SAM

CITATION = (
    "Zhang et al., Domain-Inspired Sharpness-Aware Minimization Under Domain Shifts, ICLR 2024"
)


class DomainInspired(FlatnessOptimizer):
    r"""A method whose first gradient is that of $L - \lambda \operatorname{Var}_i(L_i)$.

    Args:
        lam: weight of the variance of the domains' losses in the ascent loss; 0 leaves it out.
        ascent: the name of the ascent loss, which the closure gets as its argument.
    """

    def __init__(
        self,
        base: Optimizer,
        *args: Any,
        lam: Annotated[float, Option(Choice((0.1, 0.3, 0.5, 0.7)))] = 0.1,
        ascent: str = "ascent",
        **options: Any,
    ) -> None:
        if not 0 <= lam < math.inf:
            raise ValueError(f"lam must be a finite number, at least 0, got {lam}")
        self.lam = lam
        super().__init__(base, *args, ascent=ascent, **options)


@register_optimizer("disam", citation=CITATION, passes=2, radii=("rho",), order=0)
class DISAM(DomainInspired, SAM):
    r"""SAM whose perturbation raises all domains' losses alike.

    The perturbation follows the gradient of a different loss than the one it minimizes:

    $$ g\bigl(\theta + \rho\,\hat{a}_0\bigr), \qquad
       a_0 = \nabla \bigl(L - \lambda \operatorname{Var}_i(L_i)\bigr), $$

    where $L_i$ is the mean cross-entropy of source domain $i$ and the variance is over the domains
    (divided by their number). ``steppe train`` computes this loss for every algorithm. In your own
    loop, the closure computes it: it receives the name of the loss to differentiate, and always
    returns the main loss. `lam` is then only stored, for your closure to read.

    Two passes; one when ``rho = 0``. ``lam = 0`` is SAM.

    Examples:
        >>> import torch
        >>> from steppe.optim import DISAM
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = DISAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, lam=0.1, model=model)
        >>> x, y = torch.randn(4, 8, 3), torch.randint(2, (4, 8))  # 4 domains with 8 samples each
        >>> def closure(name="main"):
        ...     logits = model(x).flatten(0, 1)
        ...     each = torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="none")
        ...     losses = each.view(4, 8).mean(1)
        ...     loss = losses.mean()
        ...     ascent = loss - opt.lam * losses.var(correction=0)
        ...     (ascent if name == "ascent" else loss).backward()
        ...     return loss
        >>> before = opt.step(closure)
        >>> bool(closure() < before)
        True
    """


@register_optimizer("disam-gsam", citation=CITATION, passes=2, radii=("rho",), order=0)
class DISAMGSAM(DomainInspired, GSAM):
    r"""GSAM with the gradient of DISAM's ascent loss in place of its first gradient.

    The gradient $a_0$ of [`DISAM`][steppe.optim.DISAM] takes the place of $g_0$ in all of GSAM's
    equations, the direction included; see [`DISAMSAGM`][steppe.optim.DISAMSAGM].
    """


@register_optimizer("disam-sagm", citation=CITATION, passes=2, radii=("rho",), order=0)
class DISAMSAGM(DomainInspired, SAGM):
    r"""SAGM with the gradient of DISAM's ascent loss in place of its first gradient.

    The gradient $a_0$ of [`DISAM`][steppe.optim.DISAM] takes the place of $g_0$ in all of SAGM's
    equations, the direction included: $\tfrac12 (a_0 + g_1)$, with $g_1$ at
    $\theta + \rho\,\hat{a}_0 - \alpha\,a_0$. This is how the authors' code combines the two. The
    paper's equation 7 uses $a_0$ for the perturbation alone, which takes one more pass.
    """


@register_optimizer("disam-fad", citation=CITATION, passes=4, radii=("rho",))
class DISAMFAD(DomainInspired, FAD):
    r"""FAD with the gradient of DISAM's ascent loss in place of its first gradient.

    The gradient $a_0$ of [`DISAM`][steppe.optim.DISAM] takes the place of $g_0$ in all of FAD's
    equations, the direction included; see [`DISAMSAGM`][steppe.optim.DISAMSAGM]. This combination
    is ours.
    """
