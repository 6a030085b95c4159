"""SMA: the mean of all weights from a given step on."""

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor, nn

from steppe.options import Option

from .averaging import Averaging
from .batchnorm import unfrozen
from .mean import Mean
from .registry import averages, register_averaging


@register_averaging(
    "sma",
    citation="Arpit et al., Ensemble of Averages: Improving Model Selection and Boosting "
    "Performance in Domain Generalization, NeurIPS 2022",
)
class SMA(Averaging):
    r"""Simple moving average (Arpit et al., Ensemble of Averages, NeurIPS 2022).

    With \(\theta_t\) the weights after update \(t\) and \(t_0\) the `start`,

    \[
    \hat\theta_t = \theta_t \ (t \le t_0), \qquad
    \hat\theta_t = \frac{t - t_0}{t - t_0 + 1} \hat\theta_{t-1} + \frac{1}{t - t_0 + 1} \theta_t
    \ (t > t_0),
    \]

    which is the mean of \(\theta_{t_0}, \ldots, \theta_t\). The authors' code starts one update
    earlier: with its default of 100, the first iterate in the mean is \(\theta_{99}\). The initial
    weights are never averaged, so a `start` of 0 is the same as 1.

    Validation and prediction always use the average. SMA also averages the running mean and
    variance of batch norms in training mode. It needs one buffer the size of the weights.

    The average's activations differ from those whose statistics it averages. With `refresh`, one
    more forward pass per step updates them for the averaged weights, as in ERM++ (Teterwak et al.,
    WACV 2025).

    Args:
        module: the module to average, in training mode.
        start: first update in the mean.
        refresh: update batch-norm statistics with a forward pass of the average after every step;
            no effect if they are frozen.

    Examples:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> averaging = SMA(model, start=2)
        >>> for weight in (1.0, 2.0, 4.0):
        ...     torch.nn.init.constant_(model.weight, weight)
        ...     averaging.update()
        Parameter...
        >>> with averaging.applied():
        ...     model.weight.item()
        3.0
        >>> model.weight.item()
        4.0
    """

    def __init__(
        self,
        module: nn.Module,
        start: Annotated[int, Option()] = 100,
        refresh: Annotated[bool, Option()] = False,
    ) -> None:
        averages["sma"].check({"start": start, "refresh": refresh})
        super().__init__(module)
        statistics = {
            id(x) for norm in unfrozen(module) for x in (norm.running_mean, norm.running_var)
        }
        self.tensors |= {name: x for name, x in module.named_buffers() if id(x) in statistics}
        self.start = start
        self.refresh = refresh and bool(statistics)
        self.updates = 0
        self._mean = Mean()

    def update(self) -> None:
        self._check_live("update()")
        self.updates += 1
        take = self._mean.set if self.updates <= self.start else self._mean.add
        take(list(self.tensors.values()))

    @property
    def serving(self) -> bool:
        return self.updates > 0

    @property
    def refreshes(self) -> bool:
        return self.refresh and self.updates > self.start

    def state_dict(self) -> dict[str, Any]:
        self._check_live("state_dict()")
        return {
            "served": self._named(self._mean.tensors) if self.serving else None,
            "updates": self.updates,
            "weight": self._mean.weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_live("load_state_dict()")
        served = state["served"]
        self._mean = Mean(() if served is None else self._own(served), state["weight"])
        self.updates = state["updates"]

    def _average(self) -> list[Tensor]:
        return self._mean.tensors
