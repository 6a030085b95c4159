"""BMA: a mean of all weights in which the first and the last count most."""

from typing import Annotated

from torch import nn

from steppe.errors import UserError
from steppe.options import Option

from .registry import averages, register_averaging
from .sma import SMA


@register_averaging(
    "bma",
    citation="Shu et al., CLIPood: Generalizing CLIP to Out-of-Distributions, ICML 2023",
)
class BMA(SMA):
    r"""Beta moving average (Shu et al., CLIPood, ICML 2023).

    With \(\theta_0\) the initial weights and \(\theta_t\) those after update \(t\) of \(T\),

    \[
    \hat\theta = \frac{\sum_{t=0}^{T} a_t \theta_t}{\sum_{t=0}^{T} a_t}, \qquad
    a_t = \big(x_t (1 - x_t)\big)^{\beta - 1}, \qquad x_t = \frac{t + 1/2}{T + 1}.
    \]

    The weights are the density of the distribution Beta(β, β). With \(\beta < 1\), the
    pretrained and the final weights count most.

    Validation and prediction use the average of the updates so far. Like SMA, it averages the
    statistics of batch norms in training mode, and needs one buffer the size of the weights.

    Args:
        module: the module to average, with its initial weights, in training mode.
        beta: \(\beta\); 1 is the plain mean.
        steps: \(T\), the number of updates.

    Examples:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> averaging = BMA(model, beta=1.0, steps=2)
        >>> for weight in (2.0, 6.0):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        ...     averaging.update()
        >>> with averaging.applied():
        ...     model.weight.item()
        3.0
    """

    def __init__(
        self,
        module: nn.Module,
        beta: Annotated[float, Option(above=0.0)] = 0.5,
        steps: int | None = None,
    ) -> None:
        averages["bma"].check({"beta": beta})
        if steps is None:
            raise UserError("averaging 'bma' needs the number of updates: pass steps=")
        super().__init__(module, start=0)
        self.beta, self.steps = beta, steps
        self._mean.add(list(self.tensors.values()), self._weight(0))

    def update(self) -> None:
        self._check_live("update()")
        if self.updates == self.steps:
            raise RuntimeError(f"update() was called more than steps={self.steps} times")
        self.updates += 1
        self._mean.add(list(self.tensors.values()), self._weight(self.updates))

    @property
    def serving(self) -> bool:
        return True  # the initial weights are an average of their own

    def _weight(self, t: int) -> float:
        x = (t + 0.5) / (self.steps + 1)
        weight: float = (x * (1 - x)) ** (self.beta - 1)
        return weight
