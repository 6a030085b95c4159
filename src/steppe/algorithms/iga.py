"""IGA: gradients that agree in all domains."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from steppe.optim.graph import twice_differentiable
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .inner import SCALE
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "IGA",
    idea="penalty on the variance of the domains' gradients",
    processes="each process compares the gradients of its own images",
    citation="Koyama and Yamaguchi, When Is Invariance Useful in an Out-of-Distribution "
    "Generalization Problem?, arXiv 2008.01883",
    cost=3.94,
    min_domains=2,
)
class IGA(Algorithm):
    r"""Inter-environmental gradient alignment (Koyama and Yamaguchi, arXiv 2008.01883).

    Let \(g_d = \nabla R_d\) be the gradient of domain \(d\)'s mean cross-entropy with respect to
    all weights of the network, \(\bar R\) the mean of the \(R_d\) and \(\bar g\) that of the
    \(g_d\). IGA minimizes

    \[ \bar R + \lambda \sum_d \|g_d - \bar g\|^2, \]

    where \(\lambda\) is `penalty`. The gradient of the penalty contains second derivatives.

    Matches DomainBed, whose \(\bar g\) is a constant: as the differences sum to 0, the gradient is
    the same. The paper takes the trace of the gradients' variance, a mean over domains.

    Args:
        penalty: weight of the squared differences.
    """

    differentiates = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(1, 5))] = 1000.0,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty = penalty

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        weights = [p for p in self.network.parameters() if p.requires_grad]
        logits, risks, gradients = [], [], []
        for domain in range(len(prepared.sizes)):
            own = prepared.only(domain)
            # The loss contains a gradient, even under no_grad.
            with torch.enable_grad(), twice_differentiable(), _ElementaryNorm():
                logits.append(self.network(own.images, own.keep))
                risks.append(F.cross_entropy(logits[-1], own.labels))
                gradients.append(
                    torch.autograd.grad(
                        risks[-1] * SCALE, weights, create_graph=True, materialize_grads=True
                    )
                )
        risk = torch.stack(risks).mean()
        of_weights = [torch.stack(of_domains) for of_domains in zip(*gradients, strict=True)]
        penalty = torch.stack([_spread(g / SCALE) for g in of_weights]).sum()
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + self.penalty * penalty, parts, logits=torch.cat(logits))


class _ElementaryNorm(TorchFunctionMode):
    """Compute batch norm by elementary operations, because torch's has only two derivatives.

    The gradient of the penalty takes two, and optimizers that differentiate gradients one more.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    if training or mean is None or var is None:
        with torch.no_grad():  # which updates the running statistics
            F.batch_norm(x, mean, var, training=True, momentum=momentum, eps=eps)
        var, mean = torch.var_mean(exact, [0, *range(2, x.dim())], correction=0)
    scale = (var + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (exact * scale.view(shape) + shift.view(shape)).to(x.dtype)


def _spread(rows: Tensor) -> Tensor:
    return (rows - rows.mean(0)).square().sum()
