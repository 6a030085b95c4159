"""Identical conditions for all passes of a step: random states and the model's other state.

Only the first pass, at the unperturbed weights, may change what a model holds besides the optimized
weights: batch-norm statistics, a momentum encoder, the other half of a GAN.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .distributed import is_sharded
from .notices import tell
from .vectors import differ, fingerprint

Models = nn.Module | Iterable[nn.Module] | None
"""The module being trained, or several."""

CHECK_EVERY = 97
"""Steps between comparisons of contents. Ten times as many if they are large or on an accelerator,
where a comparison makes the host wait. Prime, to catch writes made every ten or hundred steps."""
LARGE = 2**25
"""Bytes above which contents count as large."""
SPARE = 2**20
"""Bytes that may always be copied as a precaution."""

_NOTHING = torch.empty(0)  # for a place without a tensor


class _Place(NamedTuple):
    """A slot for a tensor in a module: the dict of parameters or buffers, and the name."""

    owner: dict[str, Tensor | None]
    name: str
    title: str
    buffer: bool

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    @property
    def tensor(self) -> Tensor | None:
        return self.owner.get(self.name)


class _Look(NamedTuple):
    """Tensors with their versions, addresses and fingerprints (empty if not compared)."""

    tensors: list[Tensor | None]
    versions: list[int]
    addresses: list[int]
    contents: list[tuple[int, ...]]


class _Kept(NamedTuple):
    """A place, its tensor and a copy of it; None if the tensor cannot be written to."""

    place: _Place
    tensor: Tensor
    value: Tensor | None


class StillState:
    """Keep modules as the first pass left them, except for the optimized parameters.

    Rewinds random states before every later pass. Copies only the module state that passes were
    seen to change. Every step checks each tensor's version, address and identity. A write through
    ``.data`` changes none of them, so the first steps, and later ones at intervals, also compare
    contents. A tensor that cannot be copied to (sparse, expanded) is put back if it was
    replaced; a write into it causes a warning. Attributes such as `momentum` or `training` are
    never toggled: that would recompile compiled models, and `momentum=0` still advances
    `num_batches_tracked`.
    """

    def __init__(self, models: Sequence[nn.Module], optimized: Sequence[Tensor]) -> None:
        self.models, self.optimized = models, optimized
        self.generators: Sequence[Any] = ()
        """Random generators besides the global ones."""
        self._rewind: Callable[[], None] = lambda: None
        self._moving: dict[tuple[int, str], _Place] = {}
        self._constant: list[_Place] = []
        self._strangers: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self._built: tuple[list[nn.Module | None], list[str]] = ([], [])
        self._steps = 0
        self._comparing = self._capturing = False
        self._seen = _Look([], [], [], [])
        self._kept: list[_Kept] = []
        self._tried: list[_Kept] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def begin(self, device: torch.device) -> None:
        """Record the state before the first pass."""
        self._rewind = record_randomness(device, self.generators)
        if not self.models:
            return
        self._capturing = is_capturing(device)
        self._comparing = self._due() and not self._capturing
        if self._comparing or self._rebuilt():
            self._find()
        # In a first step nothing is known yet, and a capture cannot compare contents.
        if self._capturing and not self._steps:
            self._move(self._constant)
        self._seen = self._look()

    @torch.no_grad()
    def take(self) -> None:
        """Copy, after the first pass, what passes change."""
        if not self.models:
            return
        places = self._changed()
        if places and self._steps and self._comparing and not self._changed(contents=False):
            _tell(
                places,
                "changed by a write through .data, which steppe checks for only at intervals. "
                "Later passes may have changed it since the last check",
            )
        self._tell_stuck(places)
        if self._comparing and self._rebuilt():  # a layer created buffers in its first forward
            known = {place.key for place in self._constant} | self._moving.keys()
            self._find()
            places += [place for place in self._constant if place.key not in known]
        if places:
            self._move(places)
        self._kept = _cloned(self._moving.values())
        # A comparison misses a write that changes nothing yet, such as to a teacher that still
        # equals its student. So copy the rest too, unless it is much larger than the weights.
        spare = max(SPARE, 2 * sum(p.nbytes for p in self.optimized))
        if self._comparing and _nbytes(self._constant) <= spare:
            self._tried = _cloned(self._constant)
        # Another optimizer uses these gradients: later passes must not add to them.
        self._grads = [
            (p, _held(p.grad)) for p in self._strangers if p.requires_grad or p.grad is not None
        ]
        if places or self._comparing:
            self._seen = self._look()

    def again(self) -> None:
        """Rewind random states, and hide other optimizers' gradients from the next pass."""
        self._rewind()
        for p, _ in self._grads:
            p.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what a later pass wrote or replaced."""
        if self._tried:
            found = [entry for entry in self._tried if _differs(entry)]
            self._move([entry.place for entry in found])
            self._kept += found
            self._tried = [entry for entry in self._tried if entry.place.key not in self._moving]
            self._seen = self._look()
        for place, tensor, _ in self._kept:
            if place.tensor is not tensor:
                place.owner[place.name] = tensor
        tensors = [entry.tensor for entry in self._kept if entry.value is not None]
        values = [entry.value for entry in self._kept if entry.value is not None]
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape or tensor.dtype != value.dtype:  # resized in place
                tensor.data = value.clone()
        if values:
            torch._foreach_copy_(tensors, values)
        for p, grad in self._grads:
            p.grad = grad

    @torch.no_grad()
    def end(self) -> None:
        """Drop the copies, and warn about changes that only a later pass made."""
        if not self.models:
            return
        self.forget()
        self._steps += not self._capturing  # here, because a failed step compares nothing
        if late := self._changed():
            self._move(late)
            _tell(
                late,
                "changed in a later pass but not in the first, too late to restore it",
            )

    def forget(self) -> None:
        self._rewind = lambda: None
        self._kept, self._tried, self._grads = [], [], []

    def _due(self) -> bool:
        """Whether this step compares contents; see `CHECK_EVERY`."""
        now = self._steps
        if now % (10 * CHECK_EVERY) == 0:
            return True
        if now % CHECK_EVERY and (now > CHECK_EVERY or now & (now - 1)):
            return False
        waits = any(p.device.type != "cpu" for p in self.optimized[:1])
        return not waits and (now == 1 or _nbytes(self._constant) <= LARGE)

    def _shape(self) -> tuple[list[nn.Module | None], list[str]]:
        """All child modules, and all names of buffers and parameters."""
        children = [child for module in self._modules for child in module._modules.values()]
        held = [tensors for m in self._modules for tensors in (m._buffers, m._parameters)]
        return children, list(chain.from_iterable(held))

    def _rebuilt(self) -> bool:
        """Whether modules, buffers or parameters were added, renamed or removed since `_find`."""
        children, names = self._shape()
        return names != self._built[1] or differ(children, self._built[0]) or not self._modules

    def _find(self) -> None:
        """Find all places again, keeping the marks of those that passes change."""
        self._modules = list(dict.fromkeys(m for model in self.models for m in model.modules()))
        self._built = self._shape()
        optimized, memory = set(map(id, self.optimized)), set(map(_memory, self.optimized)) - {0}
        places = {
            place.key: place
            for place in self._places()
            # What shares memory with a weight must move with it.
            if id(tensor := place.tensor) not in optimized
            and not (tensor is not None and (is_lazy(tensor) or _memory(tensor) in memory))
        }
        self._moving = {key: place for key, place in places.items() if key in self._moving}
        self._constant = [place for key, place in places.items() if key not in self._moving]
        held = [place.tensor for place in places.values()]
        self._strangers = [p for p in held if isinstance(p, nn.Parameter)]
        self._move(list(self._moving.values()))  # adds new buffers of the same modules

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
        """The current state of all places that passes were not seen to change."""
        held = [owner.get(name) for owner, name, _, _ in self._constant]
        tensors = [_NOTHING if t is None else t for t in held]
        versions = _marks(_version, tensors)
        addresses = _marks(Tensor.data_ptr, tensors)
        contents: list[tuple[int, ...]] = [()] * len(tensors)
        if self._comparing:
            contents = [fingerprint(t) if _is_plain(t) else () for t in tensors]
        return _Look(held, versions, addresses, contents)

    def _changed(self, contents: bool = True) -> list[_Place]:
        """The places that changed since the last look."""
        facts = slice(1, 4 if contents else 3)
        old, new = self._seen, self._look()
        if not differ(old.tensors, new.tensors) and old[facts] == new[facts]:
            return []
        before, after = zip(*old[facts], strict=True), zip(*new[facts], strict=True)
        rows = zip(self._constant, old.tensors, new.tensors, before, after, strict=True)
        return [place for place, a, b, was, now in rows if a is not b or was != now]

    def _tell_stuck(self, places: Sequence[_Place]) -> None:
        """Warn about writes that cannot be undone."""
        before = {place.key: t for place, t in zip(self._constant, self._seen.tensors, strict=True)}
        stuck = [p for p in places if p.tensor is before[p.key] and not _is_plain(p.tensor)]
        if stuck:
            tell(
                f"{_names(stuck)}: passes write into a tensor that cannot be copied to (sparse, "
                "expanded or a subclass), so every pass of a step counts. Register a dense buffer "
                "instead."
            )

    def _move(self, places: Iterable[_Place]) -> None:
        """Restore these places from now on."""
        keys = {place.key for place in places}
        # Some batch-norm kernels raise only the version of the counter, so all buffers of a module
        # go together.
        owners = {id(place.owner) for place in places if place.buffer}
        for place in self._constant:
            if place.key in keys or id(place.owner) in owners:
                self._moving[place.key] = place
        self._constant = [place for place in self._constant if place.key not in self._moving]


def _marks(mark: Callable[[Tensor], int], tensors: list[Tensor]) -> list[int]:
    """The version or address of each tensor; 0 if it has none (sparse, inference mode)."""
    try:
        return list(map(mark, tensors))
    except RuntimeError:
        return [0] if len(tensors) == 1 else [_marks(mark, [tensor])[0] for tensor in tensors]


_version = operator.attrgetter("_version")


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _cloned(places: Iterable[_Place]) -> list[_Kept]:
    held = [(place, place.tensor) for place in places]
    return [_Kept(p, t, t.clone() if _is_plain(t) else None) for p, t in held if t is not None]


def _differs(entry: _Kept) -> bool:
    if entry.place.tensor is not entry.tensor:
        return True
    return entry.value is not None and not torch.equal(entry.tensor, entry.value)


def _nbytes(places: Iterable[_Place]) -> int:
    return sum(t.nbytes for place in places if (t := place.tensor) is not None)


def _names(places: Sequence[_Place]) -> str:
    return ", ".join(place.title for place in places[:3])


def _tell(places: Sequence[_Place], what: str) -> None:
    tell(f"{_names(places)} {what}. From now on it is restored after later passes.")


def _held(grad: Tensor | None) -> Tensor | None:
    """A gradient that no later backward overwrites: a view may belong to a DDP bucket."""
    return grad.clone() if grad is not None and grad._is_view() else grad


def _is_plain(x: Tensor | None) -> bool:
    """Whether `x` is None or a dense tensor with its own memory, which can be copied to."""
    if x is None:
        return True
    ordinary = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(x)
    if not ordinary or x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    if x.is_quantized or x.is_conj() or x.is_neg():
        return False
    expanded = any(s == 0 and size > 1 for s, size in zip(x.stride(), x.shape, strict=True))
    return not expanded and not x.is_inference()


def rewinder(generator: Any) -> Callable[[], None]:
    """Save the state of a generator and return a function that restores it.

    Accepts a `torch.Generator`, a NumPy `Generator` or `RandomState`, a `random.Random`, and the
    modules `random` and `numpy.random` for their global generators.
    """
    if hasattr(generator, "getstate"):  # random.Random
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if hasattr(generator, "get_state"):  # torch.Generator, numpy.random.RandomState
        state = generator.get_state()
        return lambda: generator.set_state(state)
    bits: Any = getattr(generator, "bit_generator", None)  # numpy.random.Generator
    if not hasattr(bits, "state"):
        raise TypeError(
            "generators takes torch.Generator, numpy.random.Generator, numpy.random.RandomState "
            f"and random.Random objects, got {type(generator).__name__}"
        )
    state = bits.state
    return lambda: setattr(bits, "state", state)


def record_randomness(device: torch.device, generators: Sequence[Any]) -> Callable[[], None]:
    """Save every global random state and return a function that restores them.

    Covers torch on the CPU and on `device`, Python's `random`, NumPy's global state if NumPy is
    loaded, and `generators`. The device generator cannot be rewound during CUDA graph capture:
    capture a whole step only if the loss draws no random numbers.
    """
    numpy = sys.modules.get("numpy")
    known = [torch.default_generator, random, *([numpy.random] if numpy else []), *generators]
    rewinders = list(map(rewinder, known))
    if device.type != "cpu" and not is_capturing(device):
        backend = torch.get_device_module(device)
        state = backend.get_rng_state(device)
        rewinders.append(lambda: backend.set_rng_state(state, device))

    def rewind() -> None:
        for one in rewinders:
            one()

    return rewind


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
