"""What `lightning` and `pytorch_lightning` share: this needs neither of them.

In automatic optimization Lightning hands `opt.step` the closure that a flatness-aware optimizer
wants. But it clips, accumulates and unscales inside that closure or around it, in single passes:
those settings need `ManualFlatness`, or an option of the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, distributed, notices

Batch = TypeVar("Batch")

STRATEGIES = {
    "FSDPStrategy": "each process holds a flat piece of the parameters, and no process sees the "
    "norm over all of them",
    "DeepSpeedStrategy": "DeepSpeed owns the weights and the step",
    "XLAStrategy": "XLA reduces gradients and takes the step by itself",
    "SingleDeviceXLAStrategy": "XLA takes the step by itself",
}
"""Strategies that are refused, by the names of their classes, and why."""

SHARDED = """\
    Trainer(strategy="ddp")

or a loop of your own, with torch's fully_shard (FSDP2) where it must be sharded."""

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

CLIPPING = """
        def on_before_optimizer_step(self, optimizer):  # .grad holds the direction
            torch.nn.utils.clip_grad_value_(self.parameters(), {clip})
"""


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
        self.on_train_batch_start(trainer)
        for opt in _flat(trainer):
            if opt.model is None:  # or batch norm would count every pass
                opt.model = trainer.lightning_module
            if trainer.precision == "bf16-mixed":  # the loss that a step gets has no graph to tell
                notices.tell_bfloat16(type(opt).__name__)
        # In front of the method, until the fit is over; a copy of the module logs for itself.
        module = trainer.lightning_module
        module.__dict__["log"] = partial(_log_first, module)
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

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
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

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Raises if a step of manual optimization went past Lightning."""
        if _steps(trainer) - trainer.global_step > self._taken:
            raise UserError(
                "A flatness-aware optimizer took a step that Lightning did not count (global_step "
                f"is {trainer.global_step}) and whose gradients it did not unscale. In manual "
                "optimization write:\n\n" + self._manual()
            )

    def on_fit_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        # A new list: the old one is being gone through.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        pl_module.__dict__.pop("log", None)

    on_exception = on_fit_end

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
                yield strategy, reason, SHARDED
        if not module.automatic_optimization:
            return
        automatic = "in automatic optimization"
        swa = any(_is_a("StochasticWeightAveraging", c) for c in trainer.callbacks)
        if swa and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            reason = "Lightning renews the statistics in an epoch whose closures run no backward"
            yield f"StochasticWeightAveraging with batch norm {automatic}", reason, self._manual()
        clip = trainer.gradient_clip_val
        own_clipping = is_overridden("configure_gradient_clipping", module, self.module)
        reason = "Lightning clips the gradient of every pass, where the direction is to be clipped"
        if own_clipping or (clip and trainer.gradient_clip_algorithm == "value"):
            remedy = self._manual(more=CLIPPING.format(clip=clip or 1.0))
            yield f"Gradient clipping {automatic}", reason, remedy
        elif clip:
            remedy = (
                f"    {type(opt).__name__}(base, ..., model=self, max_norm={clip})"
                "  # in configure_optimizers\n\nand leave gradient_clip_val out."
            )
            yield f"Trainer(gradient_clip_val={clip}) {automatic}", reason, remedy
        batches = trainer.accumulate_grad_batches
        if batches != 1:
            setting = f"Trainer(accumulate_grad_batches={batches}) {automatic}"
            remedy = self._manual(f", accumulate={batches}")
            yield setting, "only the last batch is evaluated in every pass", remedy
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            reason = "Lightning runs one pass, unscales its gradient and steps without a closure"
            yield f'Trainer(precision="16-mixed") {automatic}', reason, self._manual()
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            reason = "every pass would take another batch from the iterator"
            remedy = "    def training_step(self, batch, batch_idx): ..."
            yield f"training_step(dataloader_iter) {automatic}", reason, remedy
        if opt.needs_graph and not is_overridden("backward", module, self.module):
            reason = "it needs the graph of the gradient, and Lightning calls loss.backward()"
            yield "Automatic optimization", reason, self._manual()


class FlatnessSteps:
    """`ManualFlatness` without its base class, the package's LightningModule."""

    if TYPE_CHECKING:  # what the LightningModule beside it has
        device: Any
        lr_scheduler_step: Any
        manual_backward: Any
        optimizers: Any
        trainer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._waiting: dict[Optimizer, list[Any]] = {}

    def flatness_step(
        self,
        batch: Batch,
        loss: Callable[[Batch], Tensor],
        *,
        accumulate: int = 1,
        optimizer: Any = None,
    ) -> Tensor | None:
        """Takes one step; returns the loss at the unperturbed weights, detached.

        Schedulers of the optimizer then step by their ``interval`` and ``frequency`` as in
        automatic optimization, except `ReduceLROnPlateau`, whose metric is yours to give.

        Args:
            batch: what `training_step` was given.
            loss: from a batch to its loss; called once per batch in every pass, so log outside it.
            accumulate: how many batches make a step. Earlier ones are kept (inputs only, not
                activations) until their number is reached or the epoch ends, because every pass
                needs them all; the loss is the mean over them. Until then None is returned.
            optimizer: which of ``self.optimizers()``, where there are several.
        """
        if accumulate < 1:
            raise UserError(f"accumulate must be at least 1, got {accumulate}")
        # SWA's last epoch, for batch-norm statistics alone
        if self.trainer.fit_loop._skip_backward:
            with torch.no_grad():
                loss(batch)
            return None
        handle = self.optimizers() if optimizer is None else optimizer
        opt = _unwrap(handle)
        # Those of an optimizer that an interrupted fit has left behind are not of this one.
        known = self.trainer.optimizers
        self._waiting = {o: kept for o, kept in self._waiting.items() if o in known}
        batches = self._waiting.setdefault(opt, [])
        batches.append(batch)
        if len(batches) < accumulate and not self.trainer.is_last_batch:
            return None
        del self._waiting[opt]
        # Lightning runs training_step under autocast as a whole; here it is for the passes alone.
        with torch.autocast(self.device.type, enabled=False):
            value = self._passes(opt, batches, loss)
            handle.step()
        self._step_schedulers(opt)
        return value

    def _passes(
        self, opt: FlatnessOptimizer, batches: list[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        precision = self.trainer.precision_plugin
        total = torch.zeros((), device=self.device)
        # Lightning's DDP module, which reduces the sum once, is around the one that `opt` has.
        passes = opt.passes(
            batches,
            getattr(precision, "scaler", None),
            no_sync=lambda: distributed.no_sync([self.trainer.model]),
        )
        for phase, batch in passes:
            with precision.forward_context():
                part = loss(batch) / len(batches)
            if opt.needs_graph:
                self.manual_backward(part, create_graph=True)
            else:
                self.manual_backward(part)
            if phase.index == 0:
                total += part.detach()
        return total

    def _step_schedulers(self, opt: Optimizer) -> None:
        # Of this epoch, as Lightning counts.
        batches = self.trainer.fit_loop.epoch_loop.batch_idx + 1
        epochs = self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if scheduler.optimizer is not opt or isinstance(scheduler, ReduceLROnPlateau):
                continue
            by_step = config.interval == "step"
            over = by_step or self.trainer.is_last_batch
            if over and (batches if by_step else epochs) % config.frequency == 0:
                self.lr_scheduler_step(scheduler, None)


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


def _unwrap(handle: Any) -> FlatnessOptimizer:
    """The optimizer behind Lightning's handle, which has its methods but not its attributes."""
    opt = getattr(handle, "optimizer", None)
    if isinstance(opt, FlatnessOptimizer):
        return opt
    raise UserError(
        "flatness_step needs one of steppe.optim's flatness-aware optimizers from "
        f"configure_optimizers, got {type(handle if opt is None else opt).__name__}. Where there "
        "are several, say which: "
        "self.flatness_step(batch, self.loss, optimizer=self.optimizers()[0])."
    )
