"""What the migration pages promise: the same weights as with the library one comes from."""

import copy

import pytest

pytest.importorskip("pytorch_optimizer")

import pytorch_optimizer
import torch
from pytorch_optimizer.lr_scheduler.proportion import ProportionScheduler
from torch import nn
from torch.nn import functional as F

from steppe.optim import FAD, GSAM, SAM

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3
STEPS = 5


def network(*, batch_norm=False, dropout=0.0):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    layers = nn.Linear(5, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def groups(model, **first):
    """Two groups, of which the first may have options of its own."""
    return [{"params": model[0].parameters(), **first}, {"params": model[4].parameters()}]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steppe_steps(model, opt, n=STEPS):
    def closure():
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    return [opt.step(closure).item() for _ in range(n)]


class TwoSteps:
    """SAM as two calls around the second backward, from Eq. 2 and 3 of Foret et al.

    The perturbation is rho g / |g|, and for ASAM rho T^2 g / |T g| with T = |w|, elementwise; `rho`
    is the group's, the norm is over all groups.
    """

    def __init__(self, base, rho, adaptive):
        self.base, self.rho, self.adaptive = base, rho, adaptive

    @torch.no_grad()
    def first_step(self):
        self.old = {}
        T = {p: p.abs() if self.adaptive else torch.ones_like(p) for p in self.params()}
        norm = torch.stack([(T[p] * p.grad).norm() for p in self.params()]).norm()
        for group in self.base.param_groups:
            for p in group["params"]:
                self.old[p] = p.clone()
                p += group.get("rho", self.rho) / (norm + 1e-12) * T[p] ** 2 * p.grad
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, old in self.old.items():
            p.copy_(old)
        self.base.step()
        self.base.zero_grad()

    def params(self):
        return [p for group in self.base.param_groups for p in group["params"]]


def two_step_training(model, sam, n=STEPS):
    losses = []
    for _ in range(n):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        sam.first_step()
        F.cross_entropy(model(X), Y).backward()
        sam.second_step()
        losses.append(loss.item())
    return losses


BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
@pytest.mark.parametrize("first", [{}, {"rho": 0.3, "lr": 0.1}], ids=["one rho", "rho by group"])
def test_from_first_step_and_second_step(base, adaptive, first):
    """Losses and weights, to the last digits of float64: the norm is summed in another order."""
    model, other = network(), network()
    expected = two_step_training(
        model, TwoSteps(BASES[base](groups(model, **first)), 0.1, adaptive)
    )
    opt = SAM(BASES[base](groups(other, **first)), rho=0.1, adaptive=adaptive, model=other)
    assert steppe_steps(other, opt) == pytest.approx(expected, rel=1e-13)
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=1e-13)


def test_fad_is_sam_where_the_page_says_so():
    model, other = network(), network()
    steppe_steps(model, SAM(BASES["sgd"](model.parameters()), rho=0.1))
    steppe_steps(other, FAD(BASES["sgd"](other.parameters()), rho=0.1, alpha=1.0, beta=1.0))
    assert torch.equal(weights(model), weights(other))


def test_batch_norm_counts_once_and_dropout_draws_once():
    """With two calls, statistics are those of both points, and every pass has a mask of its own."""
    model, other = network(batch_norm=True), network(batch_norm=True)
    two_step_training(model, TwoSteps(BASES["sgd"](model.parameters()), 0.1, False), 1)
    steppe_steps(other, SAM(BASES["sgd"](other.parameters()), rho=0.1, model=other), 1)
    assert model[1].num_batches_tracked == 2
    assert other[1].num_batches_tracked == 1

    class Recorded(nn.Dropout):
        def forward(self, x):
            out = super().forward(x)
            masks.append(out == 0)
            return out

    def masks_of(train, make):
        model = network(dropout=0.5)
        model[3] = Recorded(0.5)
        masks.clear()
        train(model, make(model), 1)
        return masks[0], masks[1]

    masks: list[torch.Tensor] = []
    theirs = masks_of(
        two_step_training, lambda m: TwoSteps(BASES["sgd"](m.parameters()), 0.1, False)
    )
    assert not torch.equal(*theirs)
    assert torch.equal(*masks_of(steppe_steps, lambda m: SAM(BASES["sgd"](m.parameters()))))


def their_steps(model, opt, n=STEPS):
    """pytorch_optimizer's loop: the gradient first, then the closure for the second one."""

    def closure():
        opt.zero_grad()
        F.cross_entropy(model(X), Y).backward()

    for _ in range(n):
        closure()
        opt.step(closure)


NORM_IN_FLOAT32 = 1e-7
"""pytorch_optimizer returns the norm in float32, so perturbations differ in the eighth digit."""


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
@pytest.mark.parametrize("first", [{}, {"rho": 0.3, "lr": 0.1}], ids=["one rho", "rho by group"])
def test_from_pytorch_optimizers_sam(adaptive, first):
    model, other = network(), network()
    theirs = pytorch_optimizer.SAM(
        groups(model, **first), torch.optim.SGD, rho=0.1, adaptive=adaptive, lr=0.3, momentum=0.9
    )
    their_steps(model, theirs)
    base = torch.optim.SGD(groups(other, **first), lr=0.3, momentum=0.9)
    steppe_steps(other, SAM(base, rho=0.1, adaptive=adaptive))
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=NORM_IN_FLOAT32)


def test_its_checkpoints_continue_here():
    model = network()
    theirs = pytorch_optimizer.SAM(model.parameters(), torch.optim.AdamW, rho=0.1, lr=0.05)
    their_steps(model, theirs)
    other = copy.deepcopy(model)
    opt = SAM(torch.optim.AdamW(other.parameters(), lr=1.0), rho=1.0)
    opt.load_state_dict(copy.deepcopy(theirs.state_dict()))  # as from a file
    assert [(g["lr"], g["rho"]) for g in opt.param_groups] == [(0.05, 0.1)]
    steppe_steps(other, opt)
    their_steps(model, theirs)
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=NORM_IN_FLOAT32)


def test_from_its_gsam():
    """The class of the page and of the guide; its alpha is theirs."""
    model, other = network(), network()
    base = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    constant = ProportionScheduler(
        torch.optim.lr_scheduler.ConstantLR(base, 1.0),
        max_lr=1.0,
        min_lr=0.0,
        max_value=0.1,
        min_value=0.1,
    )
    theirs = pytorch_optimizer.GSAM(model.parameters(), base, model, constant, alpha=0.4)
    for _ in range(STEPS):
        theirs.set_closure(F.cross_entropy, X, Y)
        theirs.step()
    steppe_steps(
        other, GSAM(torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9), rho=0.1, alpha=0.4)
    )
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=NORM_IN_FLOAT32)
