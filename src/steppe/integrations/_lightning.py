"""Code shared by the integrations of `lightning` and `pytorch_lightning`; imports neither.

In automatic optimization, Lightning passes `opt.step` the closure that a flatness-aware optimizer
needs. But it clips, accumulates and unscales in or around that closure, once per pass. Those
settings need `ManualFlatness` or an option of the optimizer instead.
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
    "FSDPStrategy": "each process holds a flat shard of the parameters, so no process sees the "
    "global norm",
    "DeepSpeedStrategy": "DeepSpeed owns the weights and the step",
    "XLAStrategy": "XLA reduces gradients and takes the step itself",
    "SingleDeviceXLAStrategy": "XLA takes the step itself",
}
"""Unsupported strategies by class name, and the reason."""

SHARDED = """\
    Trainer(strategy="ddp")

If you must shard, write your own loop with torch's fully_shard (FSDP2)."""

MANUAL = """\
    from {package} import ManualFlatness

    class Net(ManualFlatness):  # a LightningModule
        def loss(self, batch):
            x, y = batch
            return cross_entropy(self(x), y)

        def training_step(self, batch, batch_idx):
            loss = self.flatness_step(batch, self.loss{arguments})
            if loss is not None:  # None while accumulating
                self.log("train_loss", loss)
{more}"""

NAMED = """\
    def loss(self, batch, name="main"):
        ..."""

CLIPPING = """
        def on_before_optimizer_step(self, optimizer):  # .grad holds the direction
            torch.nn.utils.clip_grad_value_(self.parameters(), {clip})
"""


class Checks:
    """The guard of one fit (see `steppe.optim.frameworks`): a callback without its base class.

    The first step of a steppe optimizer in a fit creates it, and the end of the fit removes it. In
    automatic optimization, it raises an error that shows the right code

    - before the first pass, for gradient clipping, accumulation, a GradScaler, a `training_step`
      that takes ``dataloader_iter``, and strategies that own or shard the parameters;
    - if later passes update a metric of the module (see `first_pass`).

    It also limits ``self.log`` to the first pass, at the unperturbed weights. In manual
    optimization, it raises for steps without passes, and for steps that bypass Lightning, which
    then neither counts nor unscales them. It sets ``model=`` of optimizers that lack it.
    """

    module: ClassVar[type]
    """The package's LightningModule."""
    nothing: Callable[[], None]
    """The package's placeholder for a missing closure."""

    def __init__(self, trainer: Any) -> None:
        self._counts: dict[str, int] = {}
        self.on_train_batch_start(trainer)
        for opt in _flat(trainer):
            if opt.model is None:  # batch norm would otherwise update its statistics in every pass
                opt.model = trainer.lightning_module
            if trainer.precision == "bf16-mixed":  # the detached loss does not show it
                notices.tell_bfloat16(type(opt).__name__)
        # An instance attribute hides the method until the fit ends; copies of the module keep it.
        module = trainer.lightning_module
        module.__dict__["log"] = partial(_log_first, module)
        trainer.callbacks.append(self)

    @classmethod
    def of(cls, opt: FlatnessOptimizer, trainer: Any) -> Self | None:
        """Return the trainer's guard after its checks; None if the trainer does not own `opt`."""
        if not any(known is opt for known in trainer.optimizers):
            return None  # the module runs this optimizer itself
        for callback in trainer.callbacks:
            if isinstance(callback, cls):
                return callback
        return cls(trainer)

    def closure(
        self, opt: FlatnessOptimizer, closure: Callable[..., Any] | None
    ) -> Callable[..., Any] | None:
        """Return the closure for a step to evaluate; None if ``.grad`` holds the direction.

        Under fp16, Lightning steps without a closure. Otherwise it always passes one, which wraps
        the user's closure, or a placeholder if there is none, and then calls hooks.
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
                "If you override optimizer_step, call optimizer.step(closure=optimizer_closure)."
            )
        if closure is not None:
            closure()
        return None

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        """Repeat the checks, because callbacks may change settings such as accumulation."""
        self._check(trainer)
        self._taken = _steps(trainer) - trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Raise if a metric was updated after the first pass."""
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
                    f"{type(optimizer).__name__} step, including passes at perturbed weights. In "
                    "training_step, write:\n\n"
                    f"    from {type(self).__module__} import first_pass\n\n"
                    "    if first_pass(self):\n"
                    f"        self.{name}.update(...)\n"
                )

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Raise if a step of manual optimization bypassed Lightning."""
        if _steps(trainer) - trainer.global_step > self._taken:
            raise UserError(
                "A flatness-aware optimizer took a step that Lightning neither counted "
                f"(global_step is {trainer.global_step}) nor unscaled. In manual optimization "
                "write:\n\n" + self._manual()
            )

    def on_fit_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        # Lightning is iterating over the old list.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        pl_module.__dict__.pop("log", None)

    on_exception = on_fit_end

    def _manual(self, arguments: str = "", more: str = "") -> str:
        return MANUAL.format(package=type(self).__module__, arguments=arguments, more=more)

    def _check(self, trainer: Any) -> None:
        for opt in _flat(trainer):
            for setting, reason, remedy in self._wrong(trainer, trainer.lightning_module, opt):
                raise UserError(
                    f"{setting} would change what a step of {type(opt).__name__} computes: "
                    f"{reason}. Write instead:\n\n{remedy}"
                )

    def _wrong(
        self, trainer: Any, module: Any, opt: FlatnessOptimizer
    ) -> Iterator[tuple[str, str, str]]:
        """Yield every unsupported setting, with the reason and the code to write instead."""
        for strategy, reason in STRATEGIES.items():
            if _is_a(strategy, trainer.strategy):
                yield strategy, reason, SHARDED
        if not module.automatic_optimization:
            return
        automatic = "in automatic optimization"
        swa = any(_is_a("StochasticWeightAveraging", c) for c in trainer.callbacks)
        if swa and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            reason = "Lightning updates the statistics in an epoch whose closures run no backward"
            yield f"StochasticWeightAveraging with batch norm {automatic}", reason, self._manual()
        clip = trainer.gradient_clip_val
        own_clipping = is_overridden("configure_gradient_clipping", module, self.module)
        reason = "Lightning would clip the gradient of every pass instead of the final direction"
        if own_clipping or (clip and trainer.gradient_clip_algorithm == "value"):
            remedy = self._manual(more=CLIPPING.format(clip=clip or 1.0))
            yield f"Gradient clipping {automatic}", reason, remedy
        elif clip:
            remedy = (
                f"    {type(opt).__name__}(base, ..., model=self, max_norm={clip})"
                "  # in configure_optimizers\n\nand remove gradient_clip_val."
            )
            yield f"Trainer(gradient_clip_val={clip}) {automatic}", reason, remedy
        batches = trainer.accumulate_grad_batches
        if batches != 1:
            setting = f"Trainer(accumulate_grad_batches={batches}) {automatic}"
            remedy = self._manual(f", accumulate={batches}")
            yield setting, "later passes would evaluate only the last batch", remedy
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            reason = "Lightning runs one pass, unscales its gradient and steps without a closure"
            yield f'Trainer(precision="16-mixed") {automatic}', reason, self._manual()
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            reason = "every pass would take a new batch from the iterator"
            remedy = "    def training_step(self, batch, batch_idx): ..."
            yield f"training_step(dataloader_iter) {automatic}", reason, remedy
        if opt.needs_graph and not is_overridden("backward", module, self.module):
            reason = "it needs backward(create_graph=True), but Lightning calls loss.backward()"
            yield "Automatic optimization", reason, self._manual()


class FlatnessSteps:
    """`ManualFlatness` without its base class, the package's LightningModule."""

    if TYPE_CHECKING:  # provided by the LightningModule
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
        loss: Callable[..., Tensor],
        *,
        accumulate: int = 1,
        optimizer: Any = None,
    ) -> Tensor | None:
        """Take one step and return the main loss, detached, from the first pass that computes it.

        Then step the optimizer's schedulers by their ``interval`` and ``frequency``, as in
        automatic optimization. Step `ReduceLROnPlateau` yourself: it needs your metric.

        Args:
            batch: the batch passed to `training_step`.
            loss: maps a batch to its loss; called once per batch in every pass, so log outside it.
                If the optimizer asks for other losses (DISAM, GGA-L), their name is its second
                argument.
            accumulate: batches per step. Every pass needs all of them, so this keeps the inputs
                (not activations) and returns None until it has that many or the epoch ends. The
                loss is the mean over batches.
            optimizer: one of ``self.optimizers()``, if there are several.
        """
        if accumulate < 1:
            raise UserError(f"accumulate must be at least 1, got {accumulate}")
        # SWA's last epoch only updates batch-norm statistics.
        if self.trainer.fit_loop._skip_backward:
            with torch.no_grad():
                loss(batch)
            return None
        handle = self.optimizers() if optimizer is None else optimizer
        opt = _unwrap(handle)
        # Drop batches that an interrupted fit left behind for another optimizer.
        known = self.trainer.optimizers
        self._waiting = {o: kept for o, kept in self._waiting.items() if o in known}
        batches = self._waiting.setdefault(opt, [])
        batches.append(batch)
        if len(batches) < accumulate and not self.trainer.is_last_batch:
            return None
        del self._waiting[opt]
        # Lightning wraps all of training_step in autocast; only the passes should use it.
        with torch.autocast(self.device.type, enabled=False):
            value = self._passes(opt, batches, loss)
            handle.step()
        self._step_schedulers(opt)
        return value

    def _passes(
        self, opt: FlatnessOptimizer, batches: list[Batch], loss: Callable[..., Tensor]
    ) -> Tensor:
        precision = self.trainer.precision_plugin
        total = torch.zeros((), device=self.device)
        first: int | None = None  # the first pass over the main loss
        # `opt.model` is inside Lightning's DDP module, which should reduce the sum once.
        passes = opt.passes(
            batches,
            getattr(precision, "scaler", None),
            no_sync=lambda: distributed.no_sync([self.trainer.model]),
        )
        for phase, batch in passes:
            other = () if phase.loss == "main" else (phase.loss,)
            if other:
                method = type(opt).__name__
                notices.check_named(loss, method, *other, batch, called="loss", example=NAMED)
            elif first is None:
                first = phase.index
            with precision.forward_context():
                part = loss(batch, *other) / len(batches)
            if opt.needs_graph:
                self.manual_backward(part, create_graph=True)
            else:
                self.manual_backward(part)
            if phase.index == first:
                total += part.detach()
        opt._scaler_known = True  # Lightning's clipping, too, asks as GradScaler does
        return total

    def _step_schedulers(self, opt: Optimizer) -> None:
        # Lightning counts batches per epoch.
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
    """Whether `training_step` runs at the unperturbed weights; use it to update metrics once.

    Automatic optimization calls `training_step` once per pass. True outside a step.
    """
    trainer: Any = module._trainer  # None for copies of the module
    return trainer is None or all(opt._open is None or not opt._open.next for opt in _flat(trainer))


def _log_first(module: Any, *args: Any, **kwargs: Any) -> None:
    if first_pass(module):
        type(module).log(module, *args, **kwargs)


def _flat(trainer: Any) -> list[FlatnessOptimizer]:
    return [opt for opt in trainer.optimizers if isinstance(opt, FlatnessOptimizer)]


def _steps(trainer: Any) -> int:
    return sum(opt.steps for opt in _flat(trainer))


def _is_a(name: str, value: object) -> bool:
    """Whether a value's class or a base class has this name, in any package."""
    return any(cls.__name__ == name for cls in type(value).__mro__)


def _unwrap(handle: Any) -> FlatnessOptimizer:
    """Return the optimizer behind Lightning's handle, which forwards methods but no attributes."""
    opt = getattr(handle, "optimizer", None)
    if isinstance(opt, FlatnessOptimizer):
        return opt
    raise UserError(
        "flatness_step needs a flatness-aware optimizer of steppe.optim from "
        f"configure_optimizers, got {type(handle if opt is None else opt).__name__}. If there are "
        "several, choose one: "
        "self.flatness_step(batch, self.loss, optimizer=self.optimizers()[0])."
    )
