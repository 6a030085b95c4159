"""The schedules under which FAD converges (Theorem 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steppe.errors import UserError
from steppe.optim import InverseSqrt


class InverseSqrtLR(LRScheduler):
    r"""Sets every group's learning rate to $\eta_t = \eta_0 / \sqrt{t}$, $t = 1, 2, \dots$

    The rates that the optimizer was built with do not matter. Call `step()` after each step of the
    optimizer, not once an epoch.

    Args:
        optimizer: any.
        eta_0: the learning rate of the first step.
        last_epoch: how many steps were taken already, less one, as in torch.
    """

    def __init__(self, optimizer: Optimizer, eta_0: float, last_epoch: int = -1) -> None:
        self.eta_0 = eta_0
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of the step to come, for each group."""
        rate = self.eta_0 / math.sqrt(self.last_epoch + 1)
        return [rate] * len(self.optimizer.param_groups)


@dataclass(frozen=True)
class ConvergenceSchedule:
    r"""The radius $\rho_0 / \sqrt{t}$ and the learning rate $\eta_0 / \sqrt{t}$.

    Attributes:
        rho: the radius as a callable of the step, counted from 1, for `FAD(base, rho=...)`.
        eta_0: the learning rate of the first step.
    """

    rho: InverseSqrt
    eta_0: float

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.eta_0 / math.sqrt(step)

    def scheduler(self, optimizer: Optimizer) -> InverseSqrtLR:
        """Sets the learning rate of all groups; call its `step()` after each of the optimizer's."""
        return InverseSqrtLR(optimizer, self.eta_0)


def convergence_schedule(rho_0: float, eta_0: float) -> ConvergenceSchedule:
    r"""The schedules of Theorem 3.2.

    For a smooth, bounded loss and bounded, unbiased gradients, they let the average squared norm
    of FAD's direction $\Delta_t = g_0 + \beta (\alpha h_0 + (1 - \alpha) h_1)$ fall:

    $$\frac{1}{T} \sum_{t=1}^T \mathbb{E} \|\Delta_t\|^2 \le \frac{C_1 + C_2 \log T}{\sqrt{T}}.$$

    The paper prints the sum without the $1/T$ that its proof divides by. The proof also takes
    $\Delta_t$ at the gradients' expectation: where their noise does not vanish, it is the direction
    without the noise that falls, and the noisy one levels off.

    Args:
        rho_0: the radius of the first step.
        eta_0: the learning rate of the first step.

    Examples:
        >>> import torch
        >>> from steppe.optim import FAD
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> schedule = convergence_schedule(rho_0=0.2, eta_0=0.1)
        >>> opt = FAD(torch.optim.SGD([w], lr=1.0), rho=schedule.rho)
        >>> rates = schedule.scheduler(opt)
        >>> def closure():
        ...     loss = w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> for step in range(3):
        ...     loss = opt.step(closure)
        ...     rates.step()
        >>> opt.param_groups[0]["lr"], schedule.lr(4), schedule.rho(4)
        (0.05, 0.05, 0.1)
    """
    for name, value in (("rho_0", rho_0), ("eta_0", eta_0)):
        if not 0 < value < math.inf:
            raise UserError(f"{name}={value}: give a positive number")
    return ConvergenceSchedule(InverseSqrt(rho_0), eta_0)
