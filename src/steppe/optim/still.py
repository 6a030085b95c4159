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

CHECK_EVERY = 97
"""Steps between two comparisons of contents; ten times as many where they are large or on an
accelerator, which has to be waited for. Odd, so as not to keep step with writes every so often."""
LARGE = 2**25
"""Bytes from which contents are large."""
SPARE = 2**20
"""Bytes that may always be kept for safety's sake."""

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
    contents: list[tuple[int, ...]]


class StillState:
    """Keeps what modules hold as the first pass left it, except the parameters being optimized.

    Only what passes have been seen to change is copied. A change shows in a tensor's version, its
    address or its place in the module, which are looked at in every step; a write through ``.data``
    shows in none of them, so contents are compared in the first steps and then now and then.
    Attributes such as `momentum` or `training` are never toggled: that would recompile compiled
    models, and `momentum=0` still advances `num_batches_tracked`.
    """

    def __init__(self, models: Sequence[nn.Module], optimized: Sequence[Tensor]) -> None:
        self.models, self.optimized = models, optimized
        self._moving: dict[tuple[int, str], _Place] = {}
        self._constant: list[_Place] = []
        self._others: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self._built: tuple[list[nn.Module | None], list[int]] = ([], [])
        self._steps = 0
        self._comparing = self._capturing = False
        self._seen = _Look([], [], [], [])
        self._kept: list[tuple[_Place, Tensor, Tensor]] = []
        self._tried: list[tuple[_Place, Tensor, Tensor]] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def begin(self, capturing: bool) -> None:
        """Looks at everything before the first pass."""
        if not self.models:
            return
        self._comparing, self._capturing = self._due() and not capturing, capturing
        if self._comparing or self._rebuilt():
            self._find()
        if capturing and not self._steps:  # nothing is known yet, and contents cannot be compared
            self._move(self._constant)
        self._seen = self._look()

    @torch.no_grad()
    def take(self) -> None:
        """Remembers, after the first pass, what passes change."""
        if not self.models:
            return
        places = self._changed()
        if places and self._steps and self._comparing and not self._changed(contents=False):
            _tell(
                places,
                "is written to through .data, which shows only now and then: later passes may have "
                "moved it since contents were last compared",
            )
        if self._comparing and self._rebuilt():  # a layer made its buffers in its first forward
            known = {place.key for place in self._constant} | self._moving.keys()
            self._find()
            places += [place for place in self._constant if place.key not in known]
        if places:
            self._move(places)
        self._kept = _cloned(self._moving.values())
        # A first comparison may miss a write that changes nothing yet, as of a teacher that still
        # equals its student: what is not much larger than the weights is kept all the same.
        if self._comparing and _nbytes(self._constant) <= max(SPARE, 2 * _size(self.optimized)):
            self._tried = _cloned(self._constant)
        # Another optimizer steps these parameters: later passes must not add to their gradients.
        self._grads = [
            (p, _held(p.grad)) for p in self._others if p.requires_grad or p.grad is not None
        ]
        if places or self._comparing:
            self._seen = self._look()

    def set_aside(self) -> None:
        """Takes the gradients of other optimizers' parameters away from the pass that follows."""
        for p, _ in self._grads:
            p.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes back what a later pass changed, and rebinds what it replaced."""
        if self._tried:
            found = [entry for entry in self._tried if _differs(*entry)]
            self._move([place for place, _, _ in found])
            self._kept += found
            self._tried = [entry for entry in self._tried if entry[0].key not in self._moving]
            self._seen = self._look()
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
        if not self.models:
            return
        self.forget()
        self._steps += not self._capturing  # only now: a step that failed has compared nothing
        if late := self._changed():
            self._move(late)
            _tell(
                late,
                "changed in a later pass of a step and not in the first, too late to be put back",
            )

    def forget(self) -> None:
        """Forgets the values of this step."""
        self._kept, self._tried, self._grads = [], [], []

    def _due(self) -> bool:
        """Whether this step compares contents: the first ones do, and then one now and then."""
        now, waits = self._steps, any(p.device.type != "cpu" for p in self.optimized[:1])
        if now == 0 or (now < CHECK_EVERY and now & (now - 1) == 0 and not waits):
            return True
        if now % CHECK_EVERY:
            return False
        return now % (10 * CHECK_EVERY) == 0 or not (waits or _nbytes(self._constant) > LARGE)

    def _shape(self) -> tuple[list[nn.Module | None], list[int]]:
        """The modules inside each module, and how many buffers each has."""
        children = [child for module in self._modules for child in module._modules.values()]
        return children, [len(module._buffers) for module in self._modules]

    def _rebuilt(self) -> bool:
        """Whether modules or their buffers were added, replaced or taken away since last found."""
        children, sizes = self._shape()
        return sizes != self._built[1] or _others(children, self._built[0]) or not self._modules

    def _find(self) -> None:
        """Finds all places anew; what was seen to move is still taken to."""
        self._modules = list(dict.fromkeys(m for model in self.models for m in model.modules()))
        self._built = self._shape()
        optimized = set(map(id, self.optimized))
        places = {
            place.key: place
            for place in self._places()
            if id(tensor := place.owner[place.name]) not in optimized and _is_plain(tensor)
        }
        self._moving = {key: place for key, place in places.items() if key in self._moving}
        self._constant = [place for key, place in places.items() if key not in self._moving]
        held = [place.owner[place.name] for place in places.values()]
        self._others = [p for p in held if isinstance(p, nn.Parameter)]
        self._move(list(self._moving.values()))  # with what has come to stand beside them

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
            versions, addresses = _marks(tensors)
        except RuntimeError:  # a pass has put something there that has none
            held = [t if _is_plain(t) else None for t in held]
            tensors = [t for t in held if t is not None]
            versions, addresses = _marks(tensors)
        contents = [fingerprint(t) for t in tensors] if self._comparing else []
        return _Look(held, versions, addresses, contents)

    def _changed(self, contents: bool = True) -> list[_Place]:
        """The places that are not as they were when last looked at."""
        old, new = self._seen, self._look()
        if not contents:
            old, new = old._replace(contents=[]), new._replace(contents=[])
        if not _others(old.tensors, new.tensors) and old[1:] == new[1:]:
            return []
        facts: dict[int, list[tuple[Any, ...]]] = {}
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


def fingerprint(x: Tensor) -> tuple[int, ...]:
    """Numbers of which a change of any one entry changes some: sums of its bits along two axes."""
    if not _is_plain(x):
        return ()
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    size = flat.element_size()
    whole = len(flat) - len(flat) % (8 // size)
    body, rest = flat[:whole], flat[whole:].view(_WORDS[size])
    if body.storage_offset() * size % 8:
        body = body.clone()
    words = body.view(torch.int64)  # sums of 64 bits run at the speed of memory
    cut = len(words) - len(words) % 4095
    table = words[:cut].view(-1, 4095)
    parts = (table.sum(0), table.sum(1), words[cut:], rest.to(torch.int64))
    return tuple(map(_weighted, parts))


def _weighted(x: Tensor) -> int:
    """A sum with odd weights: a change of one term changes it, and so does most any swap."""
    weights = torch.arange(1, len(x) + 1, device=x.device) * 0x9E3779B1 | 1
    return int((x * weights).sum())


def _marks(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """The version and the address of each."""
    return list(map(_version, tensors)), list(map(Tensor.data_ptr, tensors))


_version = operator.attrgetter("_version")


def _others(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold other objects."""
    return len(some) != len(others) or any(map(operator.is_not, some, others))


def _cloned(places: Iterable[_Place]) -> list[tuple[_Place, Tensor, Tensor]]:
    held = [(place, place.owner.get(place.name)) for place in places]
    return [(p, t, t.clone()) for p, t in held if t is not None and _is_plain(t)]


def _differs(place: _Place, tensor: Tensor, value: Tensor) -> bool:
    now = place.owner.get(place.name)
    return now is not tensor or not torch.equal(tensor, value)


def _nbytes(places: Iterable[_Place]) -> int:
    return _size([t for place in places if (t := place.owner.get(place.name)) is not None])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _tell(places: Sequence[_Place], what: str) -> None:
    names = ", ".join(place.title for place in places[:3])
    tell(f"{names} {what}. From now on it is kept as the first pass leaves it.")


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
    if x.is_quantized or x.is_conj() or x.is_neg():
        return False
    expanded = any(s == 0 and size > 1 for s, size in zip(x.stride(), x.shape, strict=True))
    return not expanded and not x.is_inference()
