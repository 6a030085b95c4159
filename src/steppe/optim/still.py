"""What all passes of a step find as the first one did: random states, and the state of the model.

Only the first pass, at the unperturbed weights, may leave a trace in what a model holds besides the
weights being optimized: in batch-norm statistics, a momentum encoder, the other half of a GAN.
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
"""Steps between two comparisons of contents; ten times as many where they are large or on an
accelerator, where comparing them makes the host wait. Not a round number, so that writes made every
ten or hundred steps are found too."""
LARGE = 2**25
"""Bytes from which contents are large."""
SPARE = 2**20
"""Bytes that may always be kept for safety's sake."""

_NOTHING = torch.empty(0)  # in a place that holds no tensor


class _Place(NamedTuple):
    """Where a module holds a tensor: its dict of parameters or buffers, and the name in it."""

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
    """The tensors in some places, with versions, addresses and fingerprints, empty if unasked."""

    tensors: list[Tensor | None]
    versions: list[int]
    addresses: list[int]
    contents: list[tuple[int, ...]]


class _Kept(NamedTuple):
    """A place, the tensor there and a copy of it; None where it cannot be copied to."""

    place: _Place
    tensor: Tensor
    value: Tensor | None


class StillState:
    """Keeps what modules hold as the first pass left it, except the parameters being optimized.

    Random states are rewound before every later pass. Of the modules' state, only what passes have
    been seen to change is copied. A change shows in a tensor's version, its address or its place in
    the module, which are looked at in every step; a write through ``.data`` shows in none of them,
    so contents are compared in the first steps and at intervals after that. A tensor that cannot be
    copied to (sparse, expanded) is put back where it was replaced, and a write into it is reported.
    Attributes such as `momentum` or `training` are never toggled: that would recompile compiled
    models, and `momentum=0` still advances `num_batches_tracked`.
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
        """Looks at everything before the first pass."""
        self._rewind = record_randomness(device, self.generators)
        if not self.models:
            return
        self._capturing = is_capturing(device)
        self._comparing = self._due() and not self._capturing
        if self._comparing or self._rebuilt():
            self._find()
        # Nothing is known in a first step, and a capture cannot compare contents.
        if self._capturing and not self._steps:
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
                "changed by a write through .data, which steppe looks for only at intervals: later "
                "passes may have moved it since contents were last compared",
            )
        self._tell_stuck(places)
        if self._comparing and self._rebuilt():  # a layer made its buffers in its first forward
            known = {place.key for place in self._constant} | self._moving.keys()
            self._find()
            places += [place for place in self._constant if place.key not in known]
        if places:
            self._move(places)
        self._kept = _cloned(self._moving.values())
        # A first comparison may miss a write that changes nothing yet, as of a teacher that still
        # equals its student: what is not much larger than the weights is kept all the same.
        spare = max(SPARE, 2 * sum(p.nbytes for p in self.optimized))
        if self._comparing and _nbytes(self._constant) <= spare:
            self._tried = _cloned(self._constant)
        # Another optimizer steps these parameters: later passes must not add to their gradients.
        self._grads = [
            (p, _held(p.grad)) for p in self._strangers if p.requires_grad or p.grad is not None
        ]
        if places or self._comparing:
            self._seen = self._look()

    def again(self) -> None:
        """Rewinds random states, and hides gradients of other optimizers from the next pass."""
        self._rewind()
        for p, _ in self._grads:
            p.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes back what a later pass changed, and rebinds what it replaced."""
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
        self._rewind = lambda: None
        self._kept, self._tried, self._grads = [], [], []

    def _due(self) -> bool:
        """Whether this step compares contents: the first ones do, and then one now and then."""
        now = self._steps
        if now % (10 * CHECK_EVERY) == 0:
            return True
        if now % CHECK_EVERY and (now > CHECK_EVERY or now & (now - 1)):
            return False
        waits = any(p.device.type != "cpu" for p in self.optimized[:1])
        return not waits and (now == 1 or _nbytes(self._constant) <= LARGE)

    def _shape(self) -> tuple[list[nn.Module | None], list[str]]:
        """The modules inside each module, and the names of its buffers and parameters."""
        children = [child for module in self._modules for child in module._modules.values()]
        held = [tensors for m in self._modules for tensors in (m._buffers, m._parameters)]
        return children, list(chain.from_iterable(held))

    def _rebuilt(self) -> bool:
        """Whether modules, buffers or parameters were added, renamed or removed since `_find`."""
        children, names = self._shape()
        return names != self._built[1] or differ(children, self._built[0]) or not self._modules

    def _find(self) -> None:
        """Finds all places anew; those that were seen to move stay marked."""
        self._modules = list(dict.fromkeys(m for model in self.models for m in model.modules()))
        self._built = self._shape()
        optimized, memory = set(map(id, self.optimized)), set(map(_memory, self.optimized)) - {0}
        places = {
            place.key: place
            for place in self._places()
            # What shares memory with a weight moves with it, and must.
            if id(tensor := place.tensor) not in optimized
            and not (tensor is not None and (is_lazy(tensor) or _memory(tensor) in memory))
        }
        self._moving = {key: place for key, place in places.items() if key in self._moving}
        self._constant = [place for key, place in places.items() if key not in self._moving]
        held = [place.tensor for place in places.values()]
        self._strangers = [p for p in held if isinstance(p, nn.Parameter)]
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
        tensors = [_NOTHING if t is None else t for t in held]
        versions = _marks(_version, tensors)
        addresses = _marks(Tensor.data_ptr, tensors)
        contents: list[tuple[int, ...]] = [()] * len(tensors)
        if self._comparing:
            contents = [fingerprint(t) if _is_plain(t) else () for t in tensors]
        return _Look(held, versions, addresses, contents)

    def _changed(self, contents: bool = True) -> list[_Place]:
        """The places that are not as they were when last looked at."""
        facts = slice(1, 4 if contents else 3)
        old, new = self._seen, self._look()
        if not differ(old.tensors, new.tensors) and old[facts] == new[facts]:
            return []
        before, after = zip(*old[facts], strict=True), zip(*new[facts], strict=True)
        rows = zip(self._constant, old.tensors, new.tensors, before, after, strict=True)
        return [place for place, a, b, was, now in rows if a is not b or was != now]

    def _tell_stuck(self, places: Sequence[_Place]) -> None:
        """Warns of writes into tensors that cannot be copied to, and so cannot be undone."""
        before = {place.key: t for place, t in zip(self._constant, self._seen.tensors, strict=True)}
        stuck = [p for p in places if p.tensor is before[p.key] and not _is_plain(p.tensor)]
        if stuck:
            tell(
                f"{_names(stuck)}: passes write into a tensor that cannot be copied to (sparse, "
                "expanded or a subclass), so later passes count too. Register a dense buffer "
                "instead."
            )

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


def _marks(mark: Callable[[Tensor], int], tensors: list[Tensor]) -> list[int]:
    """The version or the address of each; 0 where it has none (sparse, inference mode)."""
    try:
        return list(map(mark, tensors))
    except RuntimeError:
        return [0] if len(tensors) == 1 else [_marks(mark, [tensor])[0] for tensor in tensors]


_version = operator.attrgetter("_version")


def _memory(tensor: Tensor) -> int:
    """Where the storage of a tensor begins; 0 where it has none of its own."""
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
    tell(f"{_names(places)} {what}. From now on, later passes leave no trace there.")


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


def rewinder(generator: Any) -> Callable[[], None]:
    """Remembers the state of a generator and returns a function that rewinds to it.

    Takes a `torch.Generator`, a NumPy `Generator` or `RandomState`, and a `random.Random`; the
    modules `random` and `numpy.random`, too, are their global generators.
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
    """Remembers every global random state and returns a function that rewinds to it.

    Covers torch on the CPU and on `device`, Python's `random`, NumPy's global state when NumPy is
    loaded, and the `generators` given. While a CUDA graph is being captured the device generator
    cannot be rewound and is left alone: capture a whole step only where the loss draws nothing.
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
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
