"""What must stay put while one step evaluates the loss several times.

All passes of a step have to see the same loss function: the same dropout masks, the same
augmentation draws. And only the first of them, at the unperturbed weights, may leave a trace in
what the model holds besides the weights being optimized: batch-norm statistics, a momentum encoder,
the other half of a GAN.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def rewinder(generator: Any) -> Callable[[], None]:
    """Remembers the state of a generator and returns a function that rewinds to it.

    Takes a `torch.Generator`, a NumPy `Generator` or `RandomState`, and a `random.Random`.
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


def record_randomness(device: torch.device, generators: Sequence[Any] = ()) -> Callable[[], None]:
    """Remembers every global random state and returns a function that rewinds to it.

    Covers torch on the CPU and on `device`, Python's `random`, NumPy's global state when NumPy is
    loaded, and the `generators` given. While a CUDA graph is being captured the device generator
    cannot be rewound and is left alone: capture a whole step only where the loss draws nothing.
    """
    rewinders: list[Callable[[], None]] = []

    cpu = torch.get_rng_state()
    rewinders.append(lambda: torch.set_rng_state(cpu))

    if device.type != "cpu" and not is_capturing(device):
        backend = torch.get_device_module(device)
        state = backend.get_rng_state(device)
        rewinders.append(lambda: backend.set_rng_state(state, device))

    python = random.getstate()
    rewinders.append(lambda: random.setstate(python))

    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state()
        rewinders.append(lambda: numpy.random.set_state(legacy))

    rewinders += map(rewinder, generators)

    def rewind() -> None:
        for one in rewinders:
            one()

    return rewind


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Place(NamedTuple):
    """Where a module holds a tensor: its dict of parameters or buffers, and the name in it."""

    module: nn.Module
    owner: dict[str, Tensor | None]
    name: str
    title: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name


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
        self._places: list[_Place] = []
        self._moving: dict[tuple[int, str], _Place] = {}
        self._others: list[nn.Parameter] = []
        self._steps = 0
        self._comparing = False
        self._seen: list[tuple[Tensor | None, int, int]] = []
        self._prints: list[int] = []
        self._kept: list[tuple[_Place, Tensor, Tensor]] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def begin(self, capturing: bool) -> None:
        """Looks at everything before the first pass."""
        if not self.models:
            return
        self._comparing = self._steps % CHECK_EVERY == 0 and not capturing
        if self._comparing or not self._places:
            self._places = list(self._walk())
            held = [place.owner[place.name] for place in self._places]
            self._others = [p for p in held if isinstance(p, nn.Parameter) and p.requires_grad]
        if capturing and not self._steps:  # nothing is known yet, and contents cannot be compared
            self._moving = {place.key: place for place in self._places}
        self._steps += not capturing
        self._look()

    @torch.no_grad()
    def take(self) -> None:
        """Remembers, after the first pass, what passes change."""
        if not self.models:
            return
        self._add(self._changed())
        for place in self._moving.values():
            tensor = place.owner.get(place.name)
            if tensor is not None and _can_be_written_to(tensor):
                self._kept.append((place, tensor, tensor.detach().clone()))
        # Another optimizer steps these parameters: later passes must not add to their gradients.
        self._grads = [(p, _held(p.grad)) for p in self._others]
        self._look()

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
            torch._foreach_copy_([t.detach() for t in tensors], list(values))
        for p, grad in self._grads:
            p.grad = grad

    @torch.no_grad()
    def end(self) -> None:
        """Forgets the values; tells of what a later pass changed and the first did not."""
        if not self.models:
            return
        late = [place for place in self._changed() if place.key not in self._moving]
        self.forget()
        if late:
            self._add(late)
            names = ", ".join(place.title for place in late[:3])
            tell(
                f"{names} changed in a later pass of a step and not in the first, too late to be "
                "put back. From the next step on it is kept as the first pass leaves it."
            )

    def forget(self) -> None:
        """Forgets the values of this step."""
        self._kept, self._grads, self._prints = [], [], []

    def _walk(self) -> Iterator[_Place]:
        optimized = set(map(id, self.optimized))
        sharded = any(map(is_sharded, self.optimized))
        seen: set[tuple[int, str]] = set()
        for model in self.models:
            for path, module in model.named_modules():
                owners: list[Any] = [module._buffers]
                if not sharded:  # FSDP2 swaps parameters between whole and sharded by itself
                    owners.append(module._parameters)
                for owner, (name, tensor) in ((o, item) for o in owners for item in o.items()):
                    place = _Place(module, owner, name, f"{path}.{name}".lstrip("."))
                    if id(tensor) in optimized or place.key in seen:
                        continue
                    if tensor is None or _can_be_written_to(tensor):
                        seen.add(place.key)
                        yield place

    def _look(self) -> None:
        """Notes every tensor with version and address, in a step that compares contents too."""
        self._seen = self._marks()
        self._prints = self._read() if self._comparing else []

    def _marks(self) -> list[tuple[Tensor | None, int, int]]:
        held = [owner.get(name) for _, owner, name, _ in self._places]
        return [(None, 0, 0) if t is None else (t, t._version, t.data_ptr()) for t in held]

    def _read(self) -> list[int]:
        held = [owner.get(name) for _, owner, name, _ in self._places]
        return [0 if t is None else fingerprint(t) for t in held]

    def _changed(self) -> list[_Place]:
        """What is not as it was when last looked at."""
        found = [
            place
            for place, (a, *old), (b, *new) in zip(
                self._places, self._seen, self._marks(), strict=True
            )
            if a is not b or old != new
        ]
        if self._prints:
            pairs = zip(self._places, self._prints, self._read(), strict=True)
            found += [place for place, old_print, print_ in pairs if old_print != print_]
        return found

    def _add(self, places: Sequence[_Place]) -> None:
        # A kernel that updates batch-norm statistics moves the version of their counter alone: the
        # buffers of one module go together.
        owners = {id(place.owner) for place in places if place.owner is place.module._buffers}
        together = [place for place in self._places if id(place.owner) in owners] if owners else []
        for place in (*places, *together):
            self._moving.setdefault(place.key, place)


def fingerprint(x: Tensor) -> int:
    """A number that a change of any one entry changes: a weighted sum of its bits."""
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


def _can_be_written_to(x: Tensor) -> bool:
    """Plain memory: not sparse, nested, expanded, on no device, or a subclass of its own making."""
    plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not plain or x.is_nested or x.layout is not torch.strided or x.is_meta or x.is_inference():
        return False
    if is_lazy(x):
        return False
    return not any(s == 0 and size > 1 for s, size in zip(x.stride(), x.shape, strict=True))
