"""Lightning: a module for manual optimization, and a callback that refuses what would go wrong.

In automatic optimization Lightning hands `opt.step` a closure that runs `training_step` and
backward, which is what a flatness-aware optimizer wants. But whatever Lightning does to gradients
(clipping, accumulation, unscaling) it does inside that closure or around it, to single passes:
those settings need `ManualFlatness`, or an option of the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, distributed

Batch = TypeVar("Batch")

STRATEGIES: dict[type[Strategy], str] = {
    FSDPStrategy: "each process holds a flat piece of the parameters, and no process sees the norm "
    "over all of them",
    DeepSpeedStrategy: "DeepSpeed owns the weights and the step",
    XLAStrategy: "XLA reduces gradients and takes the step by itself",
    SingleDeviceXLAStrategy: "XLA takes the step by itself",
}
"""Strategies that are refused, and why."""

MANUAL = """\
    from steppe.integrations.lightning import ManualFlatness

    class Net(ManualFlatness):  # a LightningModule
        def loss(self, batch):
            x, y = batch
            return cross_entropy(self(x), y)

        def training_step(self, batch, batch_idx):
            loss = self.flatness_step(batch, self.loss{arguments})
            if loss is not None:  # None while batches are being gathered
                self.log("train_loss", loss)
{more}"""


class ManualFlatness(LightningModule):
    """A LightningModule whose steps are taken by a flatness-aware optimizer, pass by pass.

    A base class, or a mixin in front of another LightningModule. It switches manual optimization
    on; call `flatness_step` from `training_step`. Under it hold, unlike in automatic optimization:
    fp16 with Lightning's GradScaler, accumulation over batches, clipping of the direction by any
    rule, and `on_before_optimizer_step` once per step with the direction in ``.grad``.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule
        >>> from steppe.optim import FAD
        >>> class Net(ManualFlatness):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(20, 5)
        ...
        ...     def loss(self, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.cross_entropy(self.layer(x), y)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         self.log("train_loss", self.flatness_step(batch, self.loss))
        ...
        ...     def configure_optimizers(self):
        ...         base = torch.optim.SGD(self.parameters(), lr=0.1)
        ...         return FAD(base, rho=0.05, model=self, max_norm=1.0)
        >>> Net().automatic_optimization
        False
    """

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
        optimizer: LightningOptimizer | None = None,
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
        if (
            self.trainer.fit_loop._skip_backward
        ):  # SWA's last epoch, for batch-norm statistics alone
            with torch.no_grad():
                loss(batch)
            return None
        handle = self.optimizers() if optimizer is None else optimizer
        opt = _unwrap(handle)
        _check(self.trainer, self, opt)
        # Those of an optimizer that an interrupted fit has left behind are not of this one.
        known = self.trainer.optimizers
        self._waiting = {o: kept for o, kept in self._waiting.items() if o in known}
        batches = self._waiting.setdefault(opt, [])
        batches.append(batch)
        if len(batches) < accumulate and not self.trainer.is_last_batch:
            return None
        del self._waiting[opt]
        _fill_in_model(opt, self)
        # Lightning runs training_step under autocast as a whole; here it is for the passes alone.
        with torch.autocast(self.device.type, enabled=False):
            value = self._passes(opt, batches, loss)
            with _delivered(opt):
                handle.step()  # type: ignore[union-attr]
        self._step_schedulers(opt)
        return value

    def _passes(
        self, opt: FlatnessOptimizer, batches: list[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        precision = self.trainer.precision_plugin
        total = torch.zeros((), device=self.device)
        for phase in opt.phases(getattr(precision, "scaler", None)):
            with phase:
                for i, batch in enumerate(batches):
                    last = i + 1 == len(batches)  # DDP reduces the sum, once
                    with nullcontext() if last else distributed.no_sync([self.trainer.model]):
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
        batches = (
            self.trainer.fit_loop.epoch_loop.batch_idx + 1
        )  # of this epoch, as Lightning counts
        epochs = self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if scheduler.optimizer is not opt or isinstance(scheduler, ReduceLROnPlateau):
                continue
            by_step = config.interval == "step"
            over = by_step or self.trainer.is_last_batch
            if over and (batches if by_step else epochs) % config.frequency == 0:
                self.lr_scheduler_step(scheduler, None)


class FlatnessCallback(Callback):
    """Refuses settings that would silently change a flatness-aware step, and keeps logs honest.

    It does nothing where the optimizer is another. In automatic optimization it

    - raises, when fitting starts, for gradient clipping, accumulation, a GradScaler, the
      ``dataloader_iter`` flavor of `training_step`, and strategies that shard parameters without
      saying so, with the code that does the same right;
    - raises if a metric of the module is updated in later passes: see `first_pass`.

    ``self.log`` counts in the first pass only, at the unperturbed weights. In manual optimization
    it raises if steps were taken past Lightning, which then neither counted nor unscaled them. An
    optimizer without ``model=`` is given the module.

    Pass it as ``Trainer(callbacks=[FlatnessCallback()])``. An installed steppe also registers it
    with Lightning, which then adds it to every Trainer.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._taken = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the settings, and gives the optimizers the module and the module its log."""
        opts = _flat(trainer)
        if not opts:
            return
        _check(trainer, pl_module, opts[0])
        for opt in opts:
            _fill_in_model(opt, pl_module)
        # In front of the method, until the fit is over; a copy of the module logs for itself.
        pl_module.__dict__["log"] = partial(_log_first, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Checks again what a callback may change between epochs, such as accumulation."""
        opts = _flat(trainer)
        if opts:
            _check(trainer, pl_module, opts[0])
            self._taken = _steps(trainer) - trainer.global_step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
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
                    "    from steppe.integrations.lightning import first_pass\n\n"
                    "    if first_pass(self):\n"
                    f"        self.{name}.update(...)\n"
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raises if a step of manual optimization went past Lightning."""
        if _steps(trainer) - trainer.global_step > self._taken:
            raise UserError(
                "A flatness-aware optimizer took a step that Lightning did not count (global_step "
                f"is {trainer.global_step}) and whose gradients it did not unscale. In manual "
                "optimization write:\n\n" + MANUAL.format(arguments="", more="")
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the module its own log back."""
        pl_module.__dict__.pop("log", None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Gives the module its own log back."""
        pl_module.__dict__.pop("log", None)


def callbacks() -> list[Callback]:
    """What Lightning adds to every Trainer, by the entry point ``callbacks_factory``."""
    return [FlatnessCallback()]


def first_pass(module: LightningModule) -> bool:
    """Whether `training_step` runs at the unperturbed weights, for metrics that count examples.

    Automatic optimization calls `training_step` once per pass. True outside a step.
    """
    trainer = module._trainer  # none, if it is a copy that someone keeps
    return trainer is None or all(opt._open is None or not opt._open.next for opt in _flat(trainer))


def _log_first(module: LightningModule, *args: Any, **kwargs: Any) -> None:
    """`LightningModule.log`, for the first pass of a step."""
    if first_pass(module):
        type(module).log(module, *args, **kwargs)


def _flat(trainer: Trainer) -> list[FlatnessOptimizer]:
    return [opt for opt in trainer.optimizers if isinstance(opt, FlatnessOptimizer)]


def _steps(trainer: Trainer) -> int:
    return sum(opt.steps for opt in _flat(trainer))


def _fill_in_model(opt: FlatnessOptimizer, module: LightningModule) -> None:
    if opt.model is None:  # or batch norm would count every pass
        opt.model = module


def _unwrap(handle: Any) -> FlatnessOptimizer:
    """The optimizer behind Lightning's handle, which has its methods but not its attributes."""
    opt = handle.optimizer if isinstance(handle, LightningOptimizer) else handle
    if isinstance(handle, LightningOptimizer) and isinstance(opt, FlatnessOptimizer):
        return opt
    raise UserError(
        "flatness_step needs one of steppe.optim's flatness-aware optimizers from "
        f"configure_optimizers, got {type(opt).__name__}. Where there are several, say which: "
        "self.flatness_step(batch, self.loss, optimizer=self.optimizers()[0])."
    )


@contextmanager
def _delivered(opt: FlatnessOptimizer) -> Iterator[None]:
    """Inside, `opt.step` takes the step along the direction that the phases put in ``.grad``.

    Lightning always steps with a closure, an empty one in manual optimization, which fires its
    hooks; it must not be mistaken for a loss to evaluate.
    """
    take = opt.step
    patched = opt.__dict__.get("step")  # by a scheduler, which counts the calls

    def step(closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()
        take()

    opt.__dict__["step"] = step
    try:
        yield
    finally:
        del opt.__dict__["step"]
        if patched is not None:
            opt.__dict__["step"] = patched


def _check(trainer: Trainer, module: LightningModule, opt: FlatnessOptimizer) -> None:
    """Raises for the first setting under which the step would not be the optimizer's."""
    method = type(opt).__name__
    for setting, reason, remedy in _wrong(trainer, module, opt):
        raise UserError(
            f"{setting} would change what a step of {method} computes: {reason}. Write "
            f"instead:\n\n{remedy}"
        )


def _wrong(
    trainer: Trainer, module: LightningModule, opt: FlatnessOptimizer
) -> Iterator[tuple[str, str, str]]:
    """Setting, reason and the code that is right, for all that is wrong."""
    for strategy, reason in STRATEGIES.items():
        if isinstance(trainer.strategy, strategy):
            yield (
                strategy.__name__,
                reason,
                '    Trainer(strategy="ddp")\n\n'
                "or a loop of your own, with torch's fully_shard (FSDP2) where it must be sharded.",
            )
    if not module.automatic_optimization:
        return
    swa = any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if swa and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        yield (
            "StochasticWeightAveraging with batch norm in automatic optimization",
            "Lightning renews the statistics in an epoch whose closures run no backward",
            MANUAL.format(arguments="", more=""),
        )
    method = type(opt).__name__
    clip = trainer.gradient_clip_val
    own_clipping = is_overridden("configure_gradient_clipping", module)
    if own_clipping or (clip and trainer.gradient_clip_algorithm == "value"):
        yield (
            "Gradient clipping in automatic optimization",
            "Lightning clips the gradient of every pass, where the direction is to be clipped",
            MANUAL.format(
                arguments="",
                more="\n        def on_before_optimizer_step(self, optimizer):"
                "  # .grad holds the direction\n"
                f"            torch.nn.utils.clip_grad_value_(self.parameters(), {clip or 1.0})\n",
            ),
        )
    elif clip:
        yield (
            f"Trainer(gradient_clip_val={clip}) in automatic optimization",
            "Lightning clips the gradient of every pass, where the direction is to be clipped",
            f"    {method}(base, ..., model=self, max_norm={clip})  # in configure_optimizers\n\n"
            "and leave gradient_clip_val out.",
        )
    if trainer.accumulate_grad_batches != 1:
        batches = trainer.accumulate_grad_batches
        yield (
            f"Trainer(accumulate_grad_batches={batches}) in automatic optimization",
            "only the last batch is evaluated in every pass",
            MANUAL.format(arguments=f", accumulate={batches}", more=""),
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield (
            'Trainer(precision="16-mixed") in automatic optimization',
            "Lightning runs one pass, unscales its gradient and steps without a closure",
            MANUAL.format(arguments="", more=""),
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield (
            "training_step(dataloader_iter) in automatic optimization",
            "every pass would take another batch from the iterator",
            "    def training_step(self, batch, batch_idx): ...",
        )
    if opt.needs_graph and not is_overridden("backward", module):
        yield (
            "Automatic optimization",
            "it needs the graph of the gradient, and Lightning calls loss.backward()",
            MANUAL.format(arguments="", more=""),
        )
