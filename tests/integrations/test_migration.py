"""What the migration pages promise: the same weights as with the library one comes from."""

import copy

import pytest

pytest.importorskip("pytorch_optimizer")

import pytorch_optimizer as theirs
import torch
from pytorch_optimizer.lr_scheduler.proportion import ProportionScheduler
from torch import nn
from torch.nn import functional as F

from steppe.optim import FAD, GSAM, SAM, WSAM, FollowLR, FriendlySAM, LookSAM

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
    davda54 = masks_of(
        two_step_training, lambda m: TwoSteps(BASES["sgd"](m.parameters()), 0.1, False)
    )
    kozistr = masks_of(their_steps, lambda m: theirs.SAM(m.parameters(), torch.optim.SGD, lr=0.1))
    assert not torch.equal(*davda54)
    assert not torch.equal(*kozistr)
    assert torch.equal(*masks_of(steppe_steps, lambda m: SAM(BASES["sgd"](m.parameters()))))


SGD = {"lr": 0.3, "momentum": 0.9}
KINDS = {"sgd": (torch.optim.SGD, SGD), "adam": (torch.optim.Adam, {"lr": 0.05})}


def their_closure(model, opt):
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    return closure


def their_steps(model, opt, n=STEPS):
    """Train as the docs of each class of pytorch_optimizer say; return what `step` returned."""
    closure = their_closure(model, opt)
    for _ in range(n):
        if isinstance(opt, theirs.GSAM):
            opt.set_closure(F.cross_entropy, X, Y)
            result = opt.step()
        else:
            if not isinstance(opt, theirs.WSAM):
                closure()
            result = opt.step(closure)
    return result


def their_gsam(model, kind, options, *, schedule=None, high=0.1, low=0.1):
    base = kind(model.parameters(), **options)
    constant = torch.optim.lr_scheduler.ConstantLR
    rates = constant(base, 1.0) if schedule is None else schedule(base)
    radius = ProportionScheduler(
        rates, max_lr=options["lr"], min_lr=0.0, max_value=high, min_value=low
    )
    return theirs.GSAM(model.parameters(), base, model, radius, alpha=0.4)


def their_friendly(sigma):
    return lambda model, kind, options: theirs.FriendlySAM(
        model.parameters(), kind, rho=0.1, sigma=sigma, lmbda=0.8, **options
    )


def their_weighted(decouple):
    return lambda model, kind, options: theirs.WSAM(
        model, model.parameters(), kind, rho=0.1, gamma=0.7, decouple=decouple, **options
    )


def their_look(k, alpha=0.7):
    return lambda model, kind, options: theirs.LookSAM(
        model.parameters(), kind, rho=0.1, k=k, alpha=alpha, **options
    )


def their_sam(model, kind, options):
    return theirs.SAM(model.parameters(), kind, rho=0.1, **options)


EQUAL = {
    "SAM": (their_sam, lambda base: SAM(base, rho=0.1)),
    "GSAM": (their_gsam, lambda base: GSAM(base, rho=0.1, alpha=0.4)),
    "WSAM": (their_weighted(True), lambda base: WSAM(base, rho=0.1, gamma=0.7)),
    "WSAM coupled": (
        their_weighted(False),
        lambda base: WSAM(base, rho=0.1, gamma=0.7, decouple=False),
    ),
    "FriendlySAM": (their_friendly(1.0), lambda base: FriendlySAM(base, rho=0.1, lam=0.8)),
    "FriendlySAM, sigma converted": (
        their_friendly(0.5),
        lambda base: FriendlySAM(base, rho=0.1, sigma=0.5 / (0.8 + 0.5 * 0.2), lam=0.8),
    ),
    "LookSAM(k=1)": (their_look(1), lambda base: LookSAM(base, rho=0.1, k=1)),
}

NORM_IN_FLOAT32 = 1e-7
"""pytorch_optimizer returns the norm in float32, so perturbations differ in the eighth digit."""


def trained(make, kind):
    model = network()
    opt = make(model, *KINDS[kind])
    their_steps(model, opt)
    return model, opt


def trained_here(make, kind, n=STEPS):
    model = network()
    base, options = KINDS[kind]
    opt = make(base(model.parameters(), **options))
    steppe_steps(model, opt, n)
    return model, opt


def assert_same(model, other, atol=NORM_IN_FLOAT32):
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=atol)


def apart(model, other):
    return (weights(model) - weights(other)).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EQUAL)
def test_from_pytorch_optimizer(method, kind):
    make_theirs, make = EQUAL[method]
    assert_same(trained(make_theirs, kind)[0], trained_here(make, kind)[0])


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
@pytest.mark.parametrize("first", [{}, {"rho": 0.3, "lr": 0.1}], ids=["one rho", "rho by group"])
def test_from_pytorch_optimizers_sam_by_group(adaptive, first):
    model, other = network(), network()
    options = {"rho": 0.1, "adaptive": adaptive, **SGD}
    their_steps(model, theirs.SAM(groups(model, **first), torch.optim.SGD, **options))
    base = torch.optim.SGD(groups(other, **first), **SGD)
    steppe_steps(other, SAM(base, rho=0.1, adaptive=adaptive))
    assert_same(model, other)


def test_a_group_without_a_radius_counts_in_their_norm():
    model, other = network(), network()
    their_steps(model, theirs.SAM(groups(model, rho=0.0), torch.optim.SGD, rho=0.5, **SGD))
    steppe_steps(other, SAM(torch.optim.SGD(groups(other, rho=0.0), **SGD), rho=0.5))
    differences = [
        (p - q).abs().max() for p, q in zip(model.parameters(), other.parameters(), strict=True)
    ]
    assert max(differences) > 1e-3


def test_gsams_radius_follows_the_learning_rate():
    """Theirs only where the loop calls update_rho_t; an edit of `lr` reaches the base in both."""

    def halving(opt):
        return torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def run(update):
        model = network()
        opt = their_gsam(model, torch.optim.SGD, SGD, schedule=halving, high=0.3, low=0.05)
        for _ in range(STEPS):
            their_steps(model, opt, 1)
            opt.rho_scheduler.lr_scheduler.step()
            if update:
                opt.update_rho_t()
        return model

    other = network()
    radius = FollowLR(high=0.3, low=0.05, lr_high=SGD["lr"])
    opt = GSAM(torch.optim.SGD(other.parameters(), **SGD), rho=radius, alpha=0.4)
    rates = halving(opt)
    for _ in range(STEPS):
        steppe_steps(other, opt, 1)
        rates.step()
    assert_same(run(update=True), other)
    assert apart(run(update=False), other) > 1e-4


# What differs from pytorch_optimizer, as the page lists it. A failure means that the page is wrong.


def test_difference_friendly_sams_sigma():
    model, _ = trained(their_friendly(0.5), "sgd")
    other, _ = trained_here(lambda base: FriendlySAM(base, rho=0.1, sigma=0.5, lam=0.8), "sgd")
    assert apart(model, other) > 1e-5


def test_difference_looksam_projects_by_tensor_and_always_takes_two_passes():
    passes = []

    def linear():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3, bias=False)).double()
        model.register_forward_hook(lambda *_: passes.append(1))
        return model

    def both(make):
        model, other = make(), make()
        passes.clear()
        their_steps(model, their_look(3)(model, torch.optim.SGD, SGD))
        counts = [len(passes)]
        base = torch.optim.SGD(other.parameters(), **SGD)
        steppe_steps(other, LookSAM(base, rho=0.1, k=3, alpha=0.7))
        return model, other, [*counts, len(passes) - counts[0]]

    model, other, counts = both(linear)
    assert_same(model, other, atol=1e-6)  # one tensor; theirs adds 1e-8 to a norm where we add xi
    assert counts == [2 * STEPS, STEPS + 2]
    assert apart(*both(network)[:2]) > 1e-3  # several


def test_difference_wsam_clips_the_second_gradient_alone():
    """With gamma = 0 the base steps along the first gradient, which theirs does not clip."""
    model, other, plain = network(), network(), network()
    clipped = {"gamma": 0.0, "max_norm": 1e-3}
    their_steps(model, theirs.WSAM(model, model.parameters(), torch.optim.SGD, lr=0.3, **clipped))
    steppe_steps(other, WSAM(torch.optim.SGD(other.parameters(), lr=0.3), **clipped))
    steppe_steps(plain, SAM(torch.optim.SGD(plain.parameters(), lr=0.3), rho=0.0))
    assert_same(model, plain, atol=1e-13)
    assert apart(other, network()) < STEPS * 0.3 * 1e-3


METHODS = {name: make for name, (make, _) in EQUAL.items() if " " not in name}


@pytest.mark.parametrize("method", METHODS)
def test_difference_batch_norm(method):
    """Theirs counts each pass; GSAM and WSAM keep the means still, WSAM also after its step."""
    model = network(batch_norm=True)
    their_steps(model, METHODS[method](model, *KINDS["sgd"]), 1)
    other = network(batch_norm=True)
    steppe_steps(other, SAM(torch.optim.SGD(other.parameters(), **SGD), rho=0.1, model=other), 1)
    assert (model[1].num_batches_tracked, other[1].num_batches_tracked) == (2, 1)
    still = torch.equal(model[1].running_mean, other[1].running_mean)
    assert still == (method in ("GSAM", "WSAM"))
    assert (model[1].momentum == 0) == (method == "WSAM")


@pytest.mark.parametrize("method", METHODS)
def test_difference_an_error_between_the_passes(method):
    model = network()
    opt = METHODS[method](model, *KINDS["sgd"])
    before, calls = weights(model), []

    def fail_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    model.register_forward_hook(fail_second)
    with pytest.raises(InterruptedError):
        their_steps(model, opt, 1)
    left = (weights(model) - before).norm().item()
    assert 1e-12 < abs(left - 0.1) < 1e-7  # perturbed, and by a norm in float32
    calls.clear()
    other = network()
    other.register_forward_hook(fail_second)
    with pytest.raises(InterruptedError):
        steppe_steps(other, SAM(torch.optim.SGD(other.parameters(), lr=0.3), rho=0.1), 1)
    assert torch.equal(weights(other), before)


def test_difference_what_step_returns():
    def result(method):
        model = network()
        return their_steps(model, METHODS[method](model, *KINDS["sgd"]), 1)

    loss = F.cross_entropy(network()(X), Y)
    assert [result(name) for name in ("SAM", "LookSAM(k=1)", "FriendlySAM")] == [None] * 3
    assert torch.equal(result("WSAM"), loss)
    outputs, second = result("GSAM")
    assert outputs.shape == (12, 3)
    assert torch.equal(second, loss)


def test_difference_gradient_centralization():
    model, plain = network(), network()
    gc = theirs.SAM(model.parameters(), torch.optim.SGD, rho=0.1, use_gc=True, **SGD)
    their_steps(model, gc)
    their_steps(plain, their_sam(plain, torch.optim.SGD, SGD))
    assert apart(model, plain) > 1e-4


def test_difference_grad_scaler():
    """Their second gradient reaches the base with the scale in it."""
    model, other, plain = network(), network(), network()
    opt = theirs.SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def scaled(model):
        def closure():
            loss = F.cross_entropy(model(X), Y)
            scaler.scale(loss).backward()
            return loss

        return closure

    scaled(model)()
    scaler.step(opt, scaled(model))
    scaler.update()
    SAM(torch.optim.SGD(other.parameters(), lr=0.1)).step(scaled(other), scaler=scaler)
    steppe_steps(plain, SAM(torch.optim.SGD(plain.parameters(), lr=0.1)), 1)
    assert apart(other, plain) < 1e-13
    moved = [(weights(m) - weights(network())).norm() for m in (model, plain)]
    assert moved[0] / moved[1] == pytest.approx(64.0, rel=1e-6)


# Checkpoints

OTHERS = {
    "SAM": lambda base: SAM(base, rho=0.9),
    "GSAM": lambda base: GSAM(base, rho=0.1, alpha=0.4),  # theirs does not save these
    "WSAM": lambda base: WSAM(base, rho=0.9, gamma=0.1),
    "WSAM coupled": lambda base: WSAM(base, rho=0.9, gamma=0.1, decouple=False),
    "FriendlySAM": lambda base: FriendlySAM(base, rho=0.9, sigma=0.3, lam=0.1),
    "FriendlySAM, sigma converted": lambda base: FriendlySAM(base, rho=0.9, lam=0.1),
    "LookSAM(k=1)": lambda base: LookSAM(base, rho=0.9, k=1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", OTHERS)
def test_its_checkpoints_continue_here(method, kind):
    """Moments, learning rates, hyperparameters and F-SAM's mean come from theirs alone."""
    model, opt = trained(EQUAL[method][0], kind)
    other = copy.deepcopy(model)
    base, options = KINDS[kind]
    mine = OTHERS[method](base(other.parameters(), **{**options, "lr": 9.0}))
    saved = copy.deepcopy(opt.state_dict())  # as from a file
    mine.load_state_dict(saved)
    usual = trained_here(EQUAL[method][1], kind, 1)[1]
    assert {key for state in mine.state.values() for key in state} == {
        key for state in usual.state.values() for key in state
    }
    groups, expected = mine.param_groups[0], usual.param_groups[0]
    assert groups.keys() - {"initial_lr"} == expected.keys()
    assert [groups[k] for k in ("lr", "rho")] == [expected[k] for k in ("lr", "rho")]
    steppe_steps(other, mine)
    their_steps(model, opt)
    assert_same(model, other)


def test_looksams_step_count_is_taken_and_its_memory_is_not():
    model, opt = trained(their_look(3), "adam")
    mine = LookSAM(torch.optim.Adam(model.parameters()), k=3)
    mine.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert mine.steps == STEPS
    passes = []
    model.register_forward_hook(lambda *_: passes.append(mine.steps))
    steppe_steps(model, mine, 3)
    assert passes == [5, 5, 6, 6, 7]  # nothing to reuse at first; then every third step again


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["old_p", "e_w", "old_g"])
def test_davda54s_checkpoints_load_without_their_temporary_keys(kind, key):
    """davda54's state has no moments, so the base starts with new ones."""
    model, other = network(), network()
    base, options = KINDS[kind]
    shape = base(model.parameters(), **options).state_dict()["param_groups"]
    saved = {
        "state": {i: {key: p.detach().clone()} for i, p in enumerate(model.parameters())},
        "param_groups": [{**shape[0], "rho": 0.1, "adaptive": True}],
    }
    mine = SAM(base(other.parameters(), **{**options, "lr": 9.0}), rho=0.9, adaptive=True)
    mine.load_state_dict(saved)
    assert not any(mine.state.values())
    steppe_steps(other, mine)
    fresh = SAM(base(model.parameters(), **options), rho=0.1, adaptive=True)
    steppe_steps(model, fresh)
    assert torch.equal(weights(model), weights(other))


def test_a_checkpoint_of_another_method_is_refused():
    model = network()
    options = {"lr": 0.1, "adaptive": True}
    adaptive = theirs.SAM(model.parameters(), torch.optim.SGD, **options).state_dict()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=9.0))
    with pytest.raises(ValueError, match=r"adaptive=True.*Load it into SAM\(base, adaptive=True\)"):
        opt.load_state_dict(adaptive)
    assert opt.param_groups[0]["lr"] == 9.0
    weighted = theirs.WSAM(model, model.parameters(), torch.optim.SGD, **options).state_dict()
    with pytest.raises(ValueError, match="this WSAM does not compute"):
        WSAM(torch.optim.SGD(model.parameters(), lr=9.0)).load_state_dict(weighted)


def test_the_state_of_a_base_that_nests_another_is_not_taken_apart():
    model = network()
    base = theirs.Lookahead(torch.optim.SGD(model.parameters(), **SGD))
    opt = SAM(base, rho=0.1)
    steppe_steps(model, opt)
    saved, start = copy.deepcopy(base.state_dict()), copy.deepcopy(model.state_dict())
    steppe_steps(model, opt, 1)
    moved = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    opt.load_state_dict(saved)
    steppe_steps(model, opt, 1)
    torch.testing.assert_close(model.state_dict(), moved, rtol=0, atol=0)
