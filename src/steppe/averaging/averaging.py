"""The contract of weight averaging: follow a module, and lend it the average for predictions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steppe.errors import UserError


class Averaging(ABC):
    """Follows the weights of a module during training.

    A training loop calls `update` after every optimizer step, gives `observe` the validation loss
    where `due` asks for it, may stop when `finished`, and calls `finish` at the end. Whoever
    predicts does so inside `applied`.

    Build it when the module is on its device, in training mode, and has its first weights. Its
    `tensors` are what is averaged, by name: the live parameters that take gradients; a subclass may
    add batch-norm statistics.
    """

    follows_loss: ClassVar[bool] = False
    """Whether it needs validation losses, and its average is made at the end of training."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self._applied = False

    @abstractmethod
    def update(self) -> None:
        """Takes note of the weights, once after every optimizer step; the host does not wait."""

    def due(self, step: int, last: bool) -> bool:
        """Whether `observe` wants the loss after this step, counted from 0, perhaps the last."""
        return False

    def observe(self, step: int, loss: float) -> None:  # noqa: B027 - most averages need no loss
        """Takes note of the validation loss of the live weights after a step."""

    @property
    def finished(self) -> bool:
        """Whether further training cannot change the result, so that it may as well stop."""
        return False

    def finish(self) -> None:  # noqa: B027 - most averages are settled at any time
        """Settles the average: training is over."""

    def outcome(self) -> str:
        """What came of it, in words, once it is settled; nothing where there is nothing to say."""
        return ""

    @property
    @abstractmethod
    def serving(self) -> bool:
        """Whether predictions should use the average now, rather than the live weights."""

    @property
    def needs_statistics(self) -> bool:
        """Whether batch norms need `reestimate`, inside `applied`."""
        return False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the average into the module, if it is `serving`, and the live weights back after.

        Memory is exchanged, not copied, and put back whatever happens inside. Inside, `applied` has
        no further effect, and the average can neither be changed nor saved: neither can the
        weights, as a state of the module would have the average instead of them.
        """
        if self._applied or not self.serving:
            yield
            return
        live, average = list(self.tensors.values()), self._average()
        self._applied = True
        _swap(live, average)
        try:
            yield
        finally:
            _swap(live, average)
            self._applied = False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state: nested dictionaries and lists of tensors and plain values.

        Tensors are not copied. ``state["served"]`` has the weights to predict with, by name, or
        None where those are the module's own.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, which is copied to where the module is."""

    @abstractmethod
    def _average(self) -> Sequence[Tensor]:
        """What `applied` puts in, in the order of `tensors`."""

    def _check_live(self, what: str) -> None:
        """Refuses what makes no sense while the module holds the average."""
        if self._applied:
            raise RuntimeError(
                f"{what} inside applied(), where the module holds the average and not the weights "
                "being trained: leave the context first"
            )

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.tensors, tensors, strict=True))

    @torch.no_grad()
    def _own(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Copies of saved tensors, laid out and placed like the live ones, in their order."""
        saved, ours = (
            {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for tensors in (named, self.tensors)
        )
        for name in {**ours, **saved}:
            if saved.get(name) != ours.get(name):
                why = f"{name} is not averaged here"
                if name in ours:
                    found = saved.get(name, "nothing")
                    why = f"for {name} it has {found}, the model has {ours[name]}"
                raise UserError(
                    f"the saved average is of another model: {why}. Resume with the options the "
                    "run was started with."
                )
        return [torch.empty_like(live).copy_(named[n]) for n, live in self.tensors.items()]


def _swap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        a.data, b.data = b.data, a.data
