"""The guard of `lightning` and of `pytorch_lightning`: this needs neither of them.

In automatic optimization Lightning hands `opt.step` a closure that runs `training_step` and
backward, which is what a flatness-aware optimizer wants. But whatever Lightning does to gradients
(clipping, accumulation, unscaling) it does inside that closure or around it, to single passes:
those settings need `ManualFlatness`, or an option of the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Self

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, notices

STRATEGIES = {
    "FSDPStrategy": "each process holds a flat piece of the parameters, and no process sees the "
    "norm over all of them",
    "DeepSpeedStrategy": "DeepSpeed owns the weights and the step",
    "XLAStrategy": "XLA reduces gradients and takes the step by itself",
    "SingleDeviceXLAStrategy": "XLA takes the step by itself",
}
"""Strategies that are refused, by the names of their classes, and why."""

MANUAL = """\
    from {package} import ManualFlatness

    class Net(ManualFlatness):  # a LightningModule
        def loss(self, batch):
            x, y = batch
            return cross_entropy(self(x), y)

        def training_step(self, batch, batch_idx):
            loss = self.flatness_step(batch, self.loss{arguments})
            if loss is not None:  # None while batches are being gathered
                self.log("train_loss", loss)
{more}"""


class Checks:
    """The guard of one fit (`steppe.optim.frameworks`), as a callback without its base class.

    It is made by the first step of a fit whose optimizer is ours, and leaves with the fit. In
    automatic optimization it

    - raises, before the first pass, for gradient clipping, accumulation, a GradScaler, the
      ``dataloader_iter`` flavor of `training_step`, and strategies that shard parameters without
      saying so, with the code that does the same right;
    - raises if a metric of the module is updated in later passes: see `first_pass`.

    ``self.log`` counts in the first pass only, at the unperturbed weights. In manual optimization
    it raises for steps without passes, and for steps taken past Lightning, which then neither
    counted nor unscaled them. An optimizer without ``model=`` is given the module.
    """

    module: ClassVar[type]
    """The package's LightningModule."""
    nothing: Callable[[], None]
    """The package's closure for a step without one."""

    def __init__(self, trainer: Any) -> None:
        self._counts: dict[str, int] = {}
        self._check(trainer)
        for opt in _flat(trainer):
            if opt.model is None:  # or batch norm would count every pass
                opt.model = trainer.lightning_module
            if trainer.precision == "bf16-mixed":  # the loss that a step gets has no graph to tell
                notices.tell_bfloat16(type(opt).__name__)
        # In front of the method, until the fit is over; a copy of the module logs for itself.
        module = trainer.lightning_module
        module.__dict__["log"] = partial(_log_first, module)
        self._taken = _steps(trainer) - trainer.global_step
        trainer.callbacks.append(self)

    @classmethod
    def of(cls, opt: FlatnessOptimizer, trainer: Any) -> Self | None:
        """The trainer's guard, after its checks; None if the optimizer is not the trainer's."""
        if not any(known is opt for known in trainer.optimizers):
            return None  # one that a hook or a step of the module uses for itself
        for callback in trainer.callbacks:
            if isinstance(callback, cls):
                return callback
        return cls(trainer)

    def closure(
        self, opt: FlatnessOptimizer, closure: Callable[..., Any] | None
    ) -> Callable[..., Any] | None:
        """What a step is to evaluate; None if the direction is in ``.grad`` already.

        Lightning steps without a closure under fp16. Otherwise it always has one, which calls its
        hooks after the user's, or after an empty one where the user gave none.
        """
        if closure is not None:
            inner = closure.args[-1] if isinstance(closure, partial) and closure.args else closure
            if inner is not self.nothing:
                return closure
        if not opt._ready:
            raise RuntimeError(
                f"step() of {type(opt).__name__} was called without a closure, but a step needs "
                "gradients at several points: one backward is not enough. In manual optimization "
                f"write:\n\n{self._manual()}\n\n"
                "An optimizer_step of your own calls optimizer.step(closure=optimizer_closure)."
            )
        if closure is not None:
            closure()
        return None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks again what a callback may change between epochs, such as accumulation."""
        self._check(trainer)
        self._taken = _steps(trainer) - trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Compares the metrics after the first pass with those after the second."""
        if not pl_module.automatic_optimization or not isinstance(optimizer, FlatnessOptimizer):
            return
        metrics = {n: m for n, m in pl_module.named_modules() if isinstance(m, Metric)}
        if first_pass(pl_module):
            self._counts = {name: metric.update_count for name, metric in metrics.items()}
            return
        for name, metric in metrics.items():
            if metric.update_count > self._counts.get(name, 0):
                raise UserError(
                    f"training_step updates the metric {name!r} in every pass of a "
                    f"{type(optimizer).__name__} step, at perturbed weights too. Write in "
                    "training_step:\n\n"
                    f"    from {type(self).__module__} import first_pass\n\n"
                    "    if first_pass(self):\n"
                    f"        self.{name}.update(...)\n"
                )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raises if a step of manual optimization went past Lightning."""
        if _steps(trainer) - trainer.global_step > self._taken:
            raise UserError(
                "A flatness-aware optimizer took a step that Lightning did not count (global_step "
                f"is {trainer.global_step}) and whose gradients it did not unscale. In manual "
                "optimization write:\n\n" + self._manual()
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        # A new list: the old one is being gone through.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        pl_module.__dict__.pop("log", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def _manual(self, arguments: str = "", more: str = "") -> str:
        return MANUAL.format(package=type(self).__module__, arguments=arguments, more=more)

    def _check(self, trainer: Any) -> None:
        """Raises for the first setting under which the step would not be the optimizer's."""
        for opt in _flat(trainer):
            for setting, reason, remedy in self._wrong(trainer, trainer.lightning_module, opt):
                raise UserError(
                    f"{setting} would change what a step of {type(opt).__name__} computes: "
                    f"{reason}. Write instead:\n\n{remedy}"
                )

    def _wrong(
        self, trainer: Any, module: Any, opt: FlatnessOptimizer
    ) -> Iterator[tuple[str, str, str]]:
        """Setting, reason and the code that is right, for all that is wrong."""
        for strategy, reason in STRATEGIES.items():
            if _is_a(strategy, trainer.strategy):
                yield (
                    strategy,
                    reason,
                    '    Trainer(strategy="ddp")\n\n'
                    "or a loop of your own, with torch's fully_shard (FSDP2) where it must be "
                    "sharded.",
                )
        if not module.automatic_optimization:
            return
        swa = any(_is_a("StochasticWeightAveraging", c) for c in trainer.callbacks)
        if swa and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            yield (
                "StochasticWeightAveraging with batch norm in automatic optimization",
                "Lightning renews the statistics in an epoch whose closures run no backward",
                self._manual(),
            )
        clip = trainer.gradient_clip_val
        own_clipping = is_overridden("configure_gradient_clipping", module, self.module)
        if own_clipping or (clip and trainer.gradient_clip_algorithm == "value"):
            yield (
                "Gradient clipping in automatic optimization",
                "Lightning clips the gradient of every pass, where the direction is to be clipped",
                self._manual(
                    more="\n        def on_before_optimizer_step(self, optimizer):"
                    "  # .grad holds the direction\n"
                    "            torch.nn.utils.clip_grad_value_("
                    f"self.parameters(), {clip or 1.0})\n",
                ),
            )
        elif clip:
            yield (
                f"Trainer(gradient_clip_val={clip}) in automatic optimization",
                "Lightning clips the gradient of every pass, where the direction is to be clipped",
                f"    {type(opt).__name__}(base, ..., model=self, max_norm={clip})"
                "  # in configure_optimizers\n\nand leave gradient_clip_val out.",
            )
        if trainer.accumulate_grad_batches != 1:
            batches = trainer.accumulate_grad_batches
            yield (
                f"Trainer(accumulate_grad_batches={batches}) in automatic optimization",
                "only the last batch is evaluated in every pass",
                self._manual(f", accumulate={batches}"),
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            yield (
                'Trainer(precision="16-mixed") in automatic optimization',
                "Lightning runs one pass, unscales its gradient and steps without a closure",
                self._manual(),
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            yield (
                "training_step(dataloader_iter) in automatic optimization",
                "every pass would take another batch from the iterator",
                "    def training_step(self, batch, batch_idx): ...",
            )
        if opt.needs_graph and not is_overridden("backward", module, self.module):
            yield (
                "Automatic optimization",
                "it needs the graph of the gradient, and Lightning calls loss.backward()",
                self._manual(),
            )


def first_pass(module: nn.Module) -> bool:
    """Whether `training_step` runs at the unperturbed weights, for metrics that count examples.

    Automatic optimization calls `training_step` once per pass. True outside a step.
    """
    trainer: Any = module._trainer  # none, if it is a copy that someone keeps
    return trainer is None or all(opt._open is None or not opt._open.next for opt in _flat(trainer))


def _log_first(module: Any, *args: Any, **kwargs: Any) -> None:
    """`LightningModule.log`, for the first pass of a step."""
    if first_pass(module):
        type(module).log(module, *args, **kwargs)


def _flat(trainer: Any) -> list[FlatnessOptimizer]:
    return [opt for opt in trainer.optimizers if isinstance(opt, FlatnessOptimizer)]


def _steps(trainer: Any) -> int:
    return sum(opt.steps for opt in _flat(trainer))


def _is_a(name: str, value: object) -> bool:
    """Whether a class of this name is among its classes, in whichever package."""
    return any(cls.__name__ == name for cls in type(value).__mro__)
