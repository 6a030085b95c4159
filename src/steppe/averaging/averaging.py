"""The averaging contract: track a module's weights and swap in their average to predict."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steppe.errors import UserError


class Averaging(ABC):
    """Average the weights of a module during training.

    A training loop calls `update` after every optimizer step and `observe` with the validation
    loss whenever `due` is true. It may stop once `finished` is true, and calls `finish` at the
    end. Predict inside `applied`.

    Build it once the module is initialized, on its device and in training mode. `tensors` holds
    the live tensors to average, by name: the trainable parameters, to which a subclass may add
    batch-norm statistics.
    """

    follows_loss: ClassVar[bool] = False
    """Whether it needs validation losses and computes its average at the end of training."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self._applied = False

    @abstractmethod
    def update(self) -> None:
        """Record the weights after an optimizer step, without a host-device synchronization."""

    def due(self, step: int, last: bool) -> bool:
        """Whether to call `observe` after this step, counted from 0."""
        return False

    def observe(self, step: int, loss: float) -> None:  # noqa: B027 - most averages need no loss
        """Record the validation loss of the live weights after a step."""

    @property
    def finished(self) -> bool:
        """Whether further training can no longer change the average."""
        return False

    def finish(self) -> None:  # noqa: B027 - most averages are always ready
        """Compute the final average after the last step."""

    def outcome(self) -> str:
        """Describe the final average in a sentence; empty if there is nothing to report."""
        return ""

    @property
    @abstractmethod
    def serving(self) -> bool:
        """Whether predictions should use the average instead of the live weights."""

    @property
    def needs_statistics(self) -> bool:
        """Whether to call `reestimate` inside `applied` before predicting."""
        return False

    @property
    def refreshes(self) -> bool:
        """Whether to evaluate each step's images in training mode inside `applied`, after `update`.

        The average then has batch-norm statistics of its own.
        """
        return False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the module while the context is open, if it is `serving`.

        Leaving the context swaps the live weights back, even after an exception; nothing is copied.
        Nested calls have no effect. Inside the context, updating or saving the average raises an
        error. Do not save the module there either: it holds the average, not the live weights.
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
        """Return the state as nested dictionaries and lists of plain values and uncopied tensors.

        ``state["served"]`` holds the weights to predict with, by name, or None to use the
        module's own.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, copying its tensors to the module's device."""

    @abstractmethod
    def _average(self) -> Sequence[Tensor]:
        """Return the tensors that `applied` swaps in, in the order of `tensors`."""

    def _check_live(self, what: str) -> None:
        if self._applied:
            raise RuntimeError(
                f"{what} was called inside applied(), where the module holds the average instead "
                "of the live weights: leave the context first"
            )

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.tensors, tensors, strict=True))

    @torch.no_grad()
    def _own(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Copy saved tensors to the live ones' order, device and memory format."""
        saved, ours = (
            {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for tensors in (named, self.tensors)
        )
        for name in {**ours, **saved}:
            if saved.get(name) != ours.get(name):
                why = f"{name} is not averaged here"
                if name in ours:
                    found = saved.get(name, "nothing")
                    why = f"for {name} it has {found}, but the model has {ours[name]}"
                raise UserError(
                    f"the saved average belongs to a different model: {why}. Resume with the "
                    "options the run was started with."
                )
        return [torch.empty_like(live).copy_(named[n]) for n, live in self.tensors.items()]


def _swap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        a.data, b.data = b.data, a.data
