"""How much memory a step owns, counted on the CPU by watching every tensor that is made."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.optim.problems import METHODS, sgd

N = 10_007  # no other tensor here has this many elements


class Live(TorchDispatchMode):
    """Counts distinct parameter-sized memory blocks alive after each operation."""

    def __init__(self):
        super().__init__()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0
        self.known: set[int] = set()

    def blocks(self):
        alive = [t for ref in self.tensors if (t := ref()) is not None]
        return {t.untyped_storage().data_ptr() for t in alive} - self.known

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor) and t.numel() == N:
                self.tensors.append(weakref.ref(t))
        self.peak = max(self.peak, len(self.blocks()))
        return out


def counted(name, steps=3):
    """Peak and resting count of blocks beyond parameters, gradients and the base's state."""
    weight = nn.Parameter(torch.randn(N))
    scale = torch.rand(N) + 0.5
    opt = METHODS[name](sgd([weight]))
    live = Live()

    def closure():
        loss = 0.5 * (scale * weight**2).sum() + torch.sin(weight).sum()
        (grad,) = torch.autograd.grad(loss, [weight], create_graph=opt.needs_graph)
        weight.grad = grad if opt.needs_graph else grad.detach()
        return loss.detach()

    opt.step(closure)  # the base's state is made in the first step
    peaks = []
    for _ in range(steps):
        live.known = {weight.data_ptr(), scale.data_ptr()}
        live.known |= {s["momentum_buffer"].data_ptr() for s in opt.state.values()}
        live.known |= {m.data_ptr() for kept in opt._memory.values() for m in kept.values()}
        for phase in opt.phases():
            with phase:
                closure()
                live.tensors.append(weakref.ref(weight.grad))
                live.peak = 0
                live.__enter__()
            live.__exit__(None, None, None)
            peaks.append(live.peak)
        opt.step()
    resting = {weight.grad.data_ptr()}
    return max(peaks) - 1, len(live.blocks() - resting)  # one block is the gradient of the pass


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("gam-exact", "msam")])
def test_parameter_sized_buffers(name):
    peak, resting = counted(name)
    assert peak == METHODS[name].buffers
    assert resting == METHODS[name].remembers


def test_the_counter_sees_a_copy_too_many(monkeypatch):
    """The count must not be blind: a stage that subtracts out of place owns one block more."""
    monkeypatch.setattr(torch, "_foreach_sub_", torch._foreach_sub)
    assert counted("fad")[0] == METHODS["fad"].buffers + 1


def test_the_last_direction_becomes_the_backup():
    """On a CPU fresh pages cost more than the copy into them; the second step reuses memory."""
    weight = nn.Parameter(torch.randn(N))
    opt = METHODS["fad"](sgd([weight]))
    for phase in opt.phases():
        with phase:
            (weight**2).sum().backward()
    opt.step()
    direction = weight.grad.data_ptr()
    for phase in opt.phases():
        with phase:
            (weight**2).sum().backward()
        if phase.index == 0:
            assert phase._excursion.walk.backup[0].data_ptr() == direction
    opt.step()


HOLD = {
    "the tensor": lambda p: p.grad,
    "a view": lambda p: p.grad.view(-1),
    "a detached twin": lambda p: p.grad.detach(),
    "a NumPy array": lambda p: p.grad.numpy(),
}


@pytest.mark.parametrize("what", HOLD)
def test_a_gradient_somebody_keeps_is_not_overwritten(what):
    """Neither the direction of the last step nor a gradient taken inside a phase."""
    weight = nn.Parameter(torch.randn(64))
    opt = METHODS["fad"](sgd([weight]))
    kept = []
    for _ in range(2):
        for phase in opt.phases():
            with phase:
                (weight**2).sum().backward()
                kept.append((HOLD[what](weight), weight.grad.clone()))
        kept.append((HOLD[what](weight), weight.grad.clone()))
        opt.step()
    copies = [torch.as_tensor(held).reshape(-1) for held, _ in kept]
    # g0, and both directions; g1, g2 and g3 are spent, as .grad may be by any optimizer.
    for i in (0, 4, 5, 9):
        assert torch.equal(copies[i], kept[i][1])
