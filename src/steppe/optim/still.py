"""What a model holds besides the weights being optimized, kept still while passes are repeated.

Only the first pass of a step, at the unperturbed weights, may leave a trace there: in batch-norm
statistics, a momentum encoder, the other half of a GAN.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .distributed import is_sharded
from .notices import tell

Models = nn.Module | Iterable[nn.Module] | None
"""The module being trained, or several."""

CHECK_EVERY = 1000
"""Steps between two comparisons of contents: the only way to see a write through ``.data``."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Place(NamedTuple):
    """Where a module holds a tensor: its dict of parameters or buffers, and the name in it."""

    owner: dict[str, Tensor | None]
    name: str
    title: str
    buffer: bool

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name


class _Look(NamedTuple):
    """The tensors in some places, with their versions, addresses and, if asked for, contents."""

    tensors: list[Tensor | None]
    versions: list[int]
    addresses: list[int]
    contents: list[int]


class StillState:
    """Keeps what modules hold as the first pass left it, except the parameters being optimized.

    Only what passes have been seen to change is copied. A change shows in a tensor's version, its
    address or its place in the module, which are looked at in every step; a write through ``.data``
    shows in none of them, so contents are compared in the first step and then now and then.
    Attributes such as `momentum` or `training` are never toggled: that would recompile compiled
    models, and `momentum=0` still advances `num_batches_tracked`.
    """

    def __init__(self, models: Sequence[nn.Module], optimized: Sequence[Tensor]) -> None:
        self.models, self.optimized = models, optimized
        self._moving: dict[tuple[int, str], _Place] = {}
        self._constant: list[_Place] = []
        self._others: list[nn.Parameter] = []
        self._steps = 0
        self._comparing = False
        self._seen = _Look([], [], [], [])
        self._kept: list[tuple[_Place, Tensor, Tensor]] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def begin(self, capturing: bool) -> None:
        """Looks at everything before the first pass."""
        if not self.models:
            return
        self._comparing = self._steps % CHECK_EVERY == 0 and not capturing
        if self._comparing or not self._steps:
            self._find()
        if capturing and not self._steps:  # nothing is known yet, and contents cannot be compared
            self._move(self._constant)
        self._steps += not capturing
        self._seen = self._look()

    @torch.no_grad()
    def take(self) -> None:
        """Remembers, after the first pass, what passes change."""
        if not self.models:
            return
        if changed := self._changed():
            self._move(changed)
        for place in self._moving.values():
            tensor = place.owner.get(place.name)
            if tensor is not None and _is_plain(tensor):
                self._kept.append((place, tensor, tensor.clone()))
        # Another optimizer steps these parameters: later passes must not add to their gradients.
        self._grads = [(p, _held(p.grad)) for p in self._others]
        if changed or self._comparing:
            self._seen = self._look()

    def set_aside(self) -> None:
        """Takes the gradients of other optimizers' parameters away from the pass that follows."""
        for p, _ in self._grads:
            p.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes back what a later pass changed, and rebinds what it replaced."""
        for place, tensor, _ in self._kept:
            if place.owner.get(place.name) is not tensor:
                place.owner[place.name] = tensor
        if self._kept:
            _, tensors, values = zip(*self._kept, strict=True)
            torch._foreach_copy_(tensors, values)
        for p, grad in self._grads:
            p.grad = grad

    @torch.no_grad()
    def end(self) -> None:
        """Forgets the values; tells of what a later pass changed and the first did not."""
        self.forget()
        if late := self._changed():
            self._move(late)
            names = ", ".join(place.title for place in late[:3])
            tell(
                f"{names} changed in a later pass of a step and not in the first, too late to be "
                "put back. From the next step on it is kept as the first pass leaves it."
            )

    def forget(self) -> None:
        """Forgets the values of this step."""
        self._kept, self._grads = [], []

    def _find(self) -> None:
        """Finds all places anew; what was seen to move is still taken to."""
        optimized = set(map(id, self.optimized))
        places = {
            place.key: place
            for place in self._places()
            if id(tensor := place.owner[place.name]) not in optimized and _is_plain(tensor)
        }
        self._moving = {key: place for key, place in places.items() if key in self._moving}
        self._constant = [place for key, place in places.items() if key not in self._moving]
        held = [place.owner[place.name] for place in places.values()]
        self._others = [p for p in held if isinstance(p, nn.Parameter) and p.requires_grad]

    def _places(self) -> Iterator[_Place]:
        sharded = any(map(is_sharded, self.optimized))
        for model in self.models:
            for path, module in model.named_modules():
                for name in module._buffers:
                    yield _Place(module._buffers, name, f"{path}.{name}".lstrip("."), True)
                if sharded:  # FSDP2 swaps parameters between whole and sharded by itself
                    continue
                held: Any = module._parameters
                for name in (name for name, p in held.items() if p is not None):
                    yield _Place(held, name, f"{path}.{name}".lstrip("."), False)

    def _look(self) -> _Look:
        """What is where passes have not been seen to change anything."""
        held = [owner.get(name) for owner, name, _, _ in self._constant]
        tensors = [t for t in held if t is not None]
        try:
            versions = [t._version for t in tensors]
            addresses = [t.data_ptr() for t in tensors]
        except RuntimeError:  # a pass has put something there that has none
            held = [t if _is_plain(t) else None for t in held]
            tensors = [t for t in held if t is not None]
            versions = [t._version for t in tensors]
            addresses = [t.data_ptr() for t in tensors]
        contents = [fingerprint(t) for t in tensors] if self._comparing else []
        return _Look(held, versions, addresses, contents)

    def _changed(self) -> list[_Place]:
        """The places that are not as they were when last looked at."""
        old, new = self._seen, self._look()
        same = all(map(operator.is_, old.tensors, new.tensors))
        if same and old[1:] == new[1:]:
            return []
        facts: dict[int, list[tuple[int, ...]]] = {}
        for look in (old, new):
            columns = [column for column in look[1:] if column]
            rows = zip((t for t in look.tensors if t is not None), *columns, strict=True)
            for tensor, *values in rows:
                facts.setdefault(id(tensor), []).append(tuple(values))
        return [
            place
            for place, a, b in zip(self._constant, old.tensors, new.tensors, strict=True)
            if a is not b or (a is not None and facts[id(a)][0] != facts[id(a)][-1])
        ]

    def _move(self, places: Iterable[_Place]) -> None:
        """Has these places kept from now on."""
        keys = {place.key for place in places}
        # A kernel that updates batch-norm statistics moves the version of their counter alone: the
        # buffers of one module go together.
        owners = {id(place.owner) for place in places if place.buffer}
        for place in self._constant:
            if place.key in keys or id(place.owner) in owners:
                self._moving[place.key] = place
        self._constant = [place for place in self._constant if place.key not in self._moving]


def fingerprint(x: Tensor) -> int:
    """A number that a change of any one entry changes: a weighted sum of its bits."""
    if not _is_plain(x):
        return 0
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    size = 2**18 if x.device.type == "cpu" else 2**24  # what fits a cache, or few launches
    weights = torch.arange(1, min(size, len(words)) + 1, device=x.device) * 0x9E3779B1 | 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(words.split(size)):
        total += (part * weights[: len(part)]).sum() * (2 * number + 1)
    return int(total)


def _held(grad: Tensor | None) -> Tensor | None:
    """A gradient that no later backward writes to: a view may be of a bucket of DDP's."""
    return grad.clone() if grad is not None and grad._is_view() else grad


def _is_plain(x: Tensor | None) -> bool:
    """Nothing, or plain memory: not sparse, nested, expanded, lazy or a subclass with its own."""
    if x is None:
        return True
    ordinary = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(x)
    if not ordinary or x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    expanded = any(s == 0 and size > 1 for s, size in zip(x.stride(), x.shape, strict=True))
    return not expanded and not x.is_inference()
