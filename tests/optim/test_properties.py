"""Every flatness-aware optimizer x every property a torch optimizer has."""

import copy
import io
import operator
import pickle
import random

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from steppe.optim import FAD, GAM, SAM, InverseSqrt, vectors
from tests.optim.problems import DIRECTED, METHODS, PROBLEMS, Problem, sgd, train

every_method = pytest.mark.parametrize("name", METHODS)


def setup(name, problem_name="dropout", **options):
    problem = PROBLEMS[problem_name]()
    opt = METHODS[name](sgd(problem.groups()), model=problem.model, **options)
    return problem, opt


# ---- one set of groups, whatever happens ----------------------------------------------------


@every_method
def test_param_groups_are_the_bases_for_ever(name):
    problem, opt = setup(name)
    train(problem, opt, 2)
    assert opt.param_groups is opt.base.param_groups
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups is opt.base.param_groups
    assert copy.deepcopy((problem.model, opt))[1].model is not problem.model
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other.param_groups is other.base.param_groups
        assert other.base is not opt.base
        assert other.model is not problem.model
        assert all(map(operator.is_, other.model.parameters(), other.parameters()))
    opt.param_groups[0]["lr"] = 0.5
    assert opt.base.param_groups[0]["lr"] == 0.5
    assert opt.state is opt.base.state
    assert isinstance(opt, torch.optim.Optimizer)


@every_method
def test_copies_continue_identically(name):
    problem, opt = setup(name)
    train(problem, opt, 3)
    twin_model, twin_opt = copy.deepcopy((problem.model, opt))
    twin = Problem(twin_model, problem.x, problem.y)
    assert twin_opt.model is twin_model  # the pair belongs together
    train(problem, opt, 3, first=3)
    train(twin, twin_opt, 3, first=3)
    assert torch.equal(problem.weights(), twin.weights())


@every_method
def test_state_dict_resumes_bit_identically(name):
    some = {} if name == "looksam" else {"ratio": 0.5}
    problem, opt = setup(name, **some)
    train(problem, opt, 3)  # an odd number: the counter decides which of the next steps are flat
    buffer = io.BytesIO()
    torch.save({"model": problem.model.state_dict(), "opt": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)  # nothing but tensors and plain values

    resumed, opt2 = setup(name, **some)
    resumed.model.load_state_dict(saved["model"])
    opt2.load_state_dict(saved["opt"])
    train(problem, opt, 4, first=3)
    train(resumed, opt2, 4, first=3)
    assert torch.equal(problem.weights(), resumed.weights())
    assert opt2.steps == opt.steps == 7


@every_method
def test_state_dict_holds_no_perturbation(name):
    problem, opt = setup(name)
    train(problem, opt, 2)
    base = opt.base.state_dict()
    ours = opt.state_dict()
    assert ours["state"].keys() == base["state"].keys()
    tensors = sum(t.numel() for s in ours["state"].values() for t in s.values())
    assert tensors == problem.weights().numel()  # SGD's momentum and nothing more
    kept = ours["steppe"]["memory"]
    assert ours["steppe"]["step"] == 2
    assert sum(len(of_one) for of_one in kept.values()) == METHODS[name].remembers * (
        len(problem.model.state_dict())
    )


def test_a_plain_state_of_the_base_can_be_loaded():
    problem = PROBLEMS["mlp"]()
    plain = sgd(problem.groups())
    problem.loss().backward()
    plain.step()
    opt = FAD(sgd(problem.groups()), rho=0.3)
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["rho"] == 0.3
    assert len(opt.state) == 4


def test_schedules_stay_out_of_the_state():
    problem = PROBLEMS["mlp"]()
    opt = FAD(sgd(problem.groups(rho=0.7)), rho=InverseSqrt(0.1))
    saved = opt.state_dict()
    assert "rho" not in saved["param_groups"][1]
    other = FAD(sgd(PROBLEMS["mlp"]().groups()), rho=InverseSqrt(0.2))
    other.load_state_dict(saved)
    assert other.param_groups[0]["rho"] == 0.7
    assert other.param_groups[1]["rho"] == InverseSqrt(0.2)


# ---- schedulers and hooks -------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)],
        [2],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_torch_schedulers_drive_it(scheduler):
    problem, opt = setup("fad")
    plain = PROBLEMS["dropout"]()
    base = sgd(plain.groups())
    ours, theirs = SCHEDULERS[scheduler](opt), SCHEDULERS[scheduler](base)
    for t in range(6):
        train(problem, opt, 1, first=t)
        base.zero_grad()
        plain.loss().backward()
        base.step()
        ours.step()
        theirs.step()
        assert opt.param_groups[0]["lr"] == base.param_groups[0]["lr"]
        assert opt.param_groups[0]["momentum"] == base.param_groups[0]["momentum"]
    copy.deepcopy(opt)  # a scheduler replaces opt.step by a closure, which must not be copied


def test_reduce_on_plateau_drives_it():
    problem, opt = setup("sam")
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=0)
    for _ in range(2):
        train(problem, opt, 1)
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.01)


@every_method
def test_hooks_fire_once_per_step(name):
    problem, opt = setup(name)
    fired = []

    def note(kind):
        return lambda *_: fired.append(kind)

    handles = [
        opt.register_step_pre_hook(note("pre")),
        opt.register_step_post_hook(note("post")),
        opt.base.register_step_pre_hook(note("base")),
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        train(problem, opt, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(fired) == ["base", "global post", "global pre", "post", "pre"]
    train(problem, opt, 1)
    assert len(fired) == 5


def test_a_pre_hook_sees_the_direction():
    problem, opt = setup("fad")
    seen = []
    opt.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad))
    train(problem, opt, 1)
    assert seen[0] is not None


@every_method
def test_state_dict_hooks_fire_once(name):
    _, opt = setup(name)
    fired = []
    opt.register_state_dict_pre_hook(lambda o: fired.append("save"))
    opt.register_load_state_dict_post_hook(lambda o: fired.append("load"))
    opt.load_state_dict(opt.state_dict())
    assert fired == ["save", "load"]


# ---- bases ----------------------------------------------------------------------------------

BASES = {
    cls.__name__: cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
}
NOT_FOR_DENSE_ANY_SHAPE = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


@pytest.mark.parametrize("base_name", sorted(BASES.keys() - NOT_FOR_DENSE_ANY_SHAPE))
def test_any_torch_optimizer_as_base(base_name):
    """A base under FAD with beta 0 is itself; with beta > 0 it trains, and keys do not collide."""
    cls = BASES[base_name]
    problem, plain = PROBLEMS["mlp"](), PROBLEMS["mlp"]()
    options = {"lr": 0.01}
    opt = FAD(cls(problem.model.parameters(), **options), beta=0.0)
    base = cls(plain.model.parameters(), **options)
    for _ in range(4):
        opt.step(problem.closure(opt))
        base.zero_grad()
        plain.loss().backward()
        base.step()
    assert torch.equal(problem.weights(), plain.weights())
    for key, value in base.param_groups[0].items():
        if key not in ("params", "rho", "alpha", "beta"):
            assert opt.param_groups[0][key] == value, key

    opt = FAD(cls(problem.model.parameters(), **options), rho=0.1, alpha=0.5, beta=0.5)
    before = problem.loss().item()
    for _ in range(10):
        opt.step(problem.closure(opt))
    assert problem.loss().item() < before


def test_names_the_base_uses_itself_get_a_prefix():
    problem = PROBLEMS["mlp"]()
    base = torch.optim.RMSprop(problem.model.parameters(), alpha=0.9)
    opt = FAD(base, alpha=0.25)
    assert opt.param_groups[0]["alpha"] == 0.9
    assert opt.param_groups[0]["fad_alpha"] == 0.25
    opt.param_groups[0]["fad_alpha"] = 1.0
    opt.param_groups[0]["beta"] = 1.0
    assert len(opt.visits([opt.coefficients(opt._values(opt.param_groups[0], 1))])) == 2


def test_a_base_can_be_wrapped_again():
    problem = PROBLEMS["mlp"]()
    base = sgd(problem.groups(rho=0.9))
    first = SAM(base, rho=0.05)
    opt = FAD(base, rho=0.2)
    assert [g["rho"] for g in opt.param_groups] == [0.9, 0.2]  # an override stays, a default not
    with pytest.raises(RuntimeError, match="wrapped again, by FAD"):
        first.step(problem.closure(first))
    with pytest.raises(ValueError, match="beta must not be negative"):
        FAD(base, rho=5.0, beta=-1.0)  # refused, and the base is as it was
    assert [g["rho"] for g in opt.param_groups] == [0.9, 0.2]
    opt.step(problem.closure(opt))
    opt.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True"):
        opt.step(problem.closure(opt))


def test_muon_as_base():
    weight = nn.Parameter(torch.randn(4, 3))
    opt = FAD(torch.optim.Muon([weight], lr=0.01))

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss

    before = opt.step(closure)
    assert closure() < before


def test_bases_that_cannot_work_are_refused():
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(TypeError, match="LBFGS.*needs a closure"):
        FAD(torch.optim.LBFGS(params))
    with pytest.raises(TypeError, match="wrap its base instead"):
        SAM(FAD(sgd(params)))
    with pytest.raises(TypeError, match=r"SGD\(model.parameters"):
        FAD(params)
    with pytest.raises(TypeError, match="SGD"):
        FAD(torch.optim.SGD)


def test_add_param_group():
    problem, opt = setup("fad")
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt.add_param_group({"params": [extra], "alpha": 0.9})
    assert opt.base.param_groups[-1]["rho"] == METHODS["fad"].hyper["rho"]
    assert opt.base.param_groups[-1]["alpha"] == 0.9

    def closure():
        loss = problem.loss() + (extra**2).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert (extra != 1).all()


def test_named_parameters():
    problem = PROBLEMS["mlp"]()
    opt = FAD(sgd(problem.model.named_parameters()))
    train(problem, opt, 2)
    names = opt.state_dict()["param_groups"][0]["param_names"]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


# ---- parameters -----------------------------------------------------------------------------


@every_method
def test_parameters_without_gradients_are_left_alone(name):
    """Frozen ones, and ones the loss does not use: no decay, no state, as the base treats them."""
    problem, _ = setup(name, "mlp")
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    problem.model[0].weight.requires_grad_(False)
    frozen = problem.model[0].weight.clone()
    opt = METHODS[name](sgd([*problem.model.parameters(), unused]))
    train(problem, opt, 3)
    assert torch.equal(problem.model[0].weight, frozen)
    assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
    assert unused.grad is None
    assert unused not in opt.state


@pytest.mark.parametrize("name", DIRECTED)
def test_shared_parameters(name):
    """A tied weight is perturbed once and gets the sum of its gradients."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    problem = Problem(
        nn.Sequential(first, nn.Tanh(), second), torch.randn(8, 4).double(), torch.randint(4, (8,))
    )
    opt = METHODS[name](torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9))
    expected = problem.weights()
    opt.step(problem.closure(opt))
    grad = lambda point: problem.gradient(point, 0)  # noqa: E731
    memory = {"shapes": [p.shape for p in problem.model.parameters()]}
    expected = expected - 0.1 * METHODS[name].direction(grad, expected, memory=memory)
    torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["fad", "sam", "gam", "gam-release"])
def test_a_parameter_that_joins_in_a_later_pass(name):
    """Routing may change at the perturbed point; a missing gradient counts as zero."""
    calls = 0
    a = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    late = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    b = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def loss_at(theta, k):
        used = (theta[:2] ** 3).sum() + torch.sin(theta[3])
        return used + theta[2] ** 2 if k > 0 else used

    def closure():
        nonlocal calls
        parts = [a, late, b] if calls > 0 else [a, late.detach(), b]
        loss = loss_at(torch.cat(parts), calls)
        calls += 1
        loss.backward()
        return loss

    method = METHODS[name]
    start = torch.cat([a, late, b]).detach()
    opt = method(torch.optim.SGD([a, late, b], lr=0.1))
    opt.step(closure)
    k = -1

    def grad(theta):
        nonlocal k
        k += 1
        return torch.func.grad(loss_at)(theta, k)

    expected = start - 0.1 * method.direction(grad, start)
    torch.testing.assert_close(torch.cat([a, late, b]).detach(), expected, rtol=0, atol=1e-12)


def test_a_gradient_missing_in_a_later_pass_is_zero():
    """The other way round: a parameter used at theta and not at the perturbed point."""
    a = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    b = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    calls = 0

    def closure():
        nonlocal calls
        loss = a**2 + (b**2 if calls == 0 else 0.0)
        calls += 1
        loss.backward()
        return loss.detach()

    SAM(torch.optim.SGD([a, b], lr=0.1), rho=0.5).step(closure)
    length = (2.0**2 + 4.0**2) ** 0.5
    assert a.item() == pytest.approx(1.0 - 0.1 * 2 * (1.0 + 0.5 * 2.0 / length))
    assert b.item() == 2.0


def test_gam_release_takes_the_size_of_beta_2():
    problem = PROBLEMS["mlp"]()
    method = METHODS["gam-release"]
    opt = method(torch.optim.SGD(problem.model.parameters(), lr=0.1), grad_beta_0=1.7)
    start = problem.weights()
    train(problem, opt, 1)
    grad = lambda point: problem.gradient(point, 0)  # noqa: E731
    expected = start - 0.1 * method.direction(grad, start, grad_beta_0=1.7)
    torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-6, 300.0])
def test_half_precision_parameters(dtype, size):
    """Neither a vanishing gradient nor one whose square overflows its type does harm."""
    w = nn.Parameter(torch.ones(4096, dtype=dtype))
    opt = SAM(torch.optim.SGD([w], lr=1e-4), rho=1.0)
    points = []

    def closure():
        points.append(w.detach().clone())
        w.grad = torch.full_like(w, size)
        return 0.0

    opt.step(closure)
    assert w.isfinite().all()
    moved = (points[1].float() - points[0].float()).norm().item()
    if size == 300.0:  # |g| = 19,200: its square is not an fp16 number
        assert moved == pytest.approx(1.0, rel=0.05)


def test_xi_is_scaled_with_the_loss():
    """At a gradient of the size of xi, a loss scale must not change the perturbation."""
    results = []
    for scale in (None, torch.amp.GradScaler("cpu", init_scale=2.0**16)):
        w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        opt = SAM(torch.optim.SGD([w], lr=1e6), rho=0.5, xi=1e-8)

        def closure(w=w, scale=scale):
            loss = 5e-9 * (w**2).sum()
            (loss if scale is None else scale.scale(loss)).backward()
            return loss

        opt.step(closure, scaler=scale)
        results.append(w.item())
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert results[0] != pytest.approx(1.0 - 1e6 * 1e-8 * 1.5, rel=1e-3)  # xi does shorten it


@every_method
def test_a_zero_gradient_gives_no_nan(name):
    w = nn.Parameter(torch.zeros(3))
    opt = METHODS[name](sgd([w]))

    def closure():
        loss = (w**2).sum()
        loss.backward(create_graph=opt.needs_graph)
        return loss

    opt.step(closure)
    assert torch.equal(w, torch.zeros(3))


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="complex.*view_as_real"):
        FAD(sgd([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))
    devices = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        FAD(sgd(devices))
    table = nn.Embedding(4, 2, sparse=True)
    opt = FAD(torch.optim.SGD(table.parameters(), lr=0.1))

    def closure():
        loss = table(torch.tensor([1, 2])).sum()
        loss.backward()
        return loss

    before = table.weight.clone()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step(closure)
    assert torch.equal(table.weight, before)
    with pytest.raises(ValueError, match="maximize=True"):
        FAD(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, maximize=True))


def test_a_group_that_cannot_work_is_not_added():
    _, opt = setup("fad")
    with pytest.raises(ValueError, match="complex"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    with pytest.raises(ValueError, match="rho must not be negative"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "rho": -1.0})
    assert len(opt.base.param_groups) == 1


class Caching(nn.Module):
    """Buffers of the awkward kinds: expanded, replaced in forward, growing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(3).to_sparse_csr())
        self.register_buffer("missing", None)
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.grown = torch.cat([self.grown, self.grown[-1:] + 1])
        return (x * self.weight).sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_buffers_that_are_replaced_count_one_pass():
    model = Caching()
    opt = FAD(sgd(model.parameters()), model=model)

    def closure():
        loss = model(torch.ones(3)) ** 2
        loss.backward()
        return loss

    opt.step(closure)
    assert model.replaced.item() == 1
    assert model.grown.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: FAD(b, rho=-0.1), "rho must not be negative"),
        (lambda b: FAD(b, rho=float("nan")), "rho must be a finite number"),
        (lambda b: FAD(b, rho="big"), "rho must be a finite number, got 'big'"),
        (lambda b: GAM(b, alpha=-1.0), "alpha must not be negative"),
        (lambda b: SAM(b, eta=0.5), "adaptive=True"),
        (lambda b: FAD(b, alpha=1.5), r"alpha must be in \[0, 1\], got 1.5"),
        (lambda b: FAD(b, beta=-1.0), "beta must not be negative"),
        (lambda b: FAD(b, ratio=0.0), r"ratio must be in \(0, 1\]"),
        (lambda b: FAD(b, perturbation="both"), "'global' or 'local'"),
        (lambda b: FAD(b, max_norm=0.0), "max_norm must be positive"),
        (lambda b: FAD(b, xi=0.0), "xi must be positive"),
        (lambda b: SAM(b, adaptive=True, eta=-1.0), "eta must not be negative"),
    ],
)
def test_hyper_parameters_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make(sgd([nn.Parameter(torch.zeros(2))]))


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="gamma"):
        FAD(sgd([nn.Parameter(torch.zeros(2))]), gamma=1.0)


# ---- one loss function per step -------------------------------------------------------------


@every_method
def test_every_source_of_randomness_is_replayed(name):
    problem, opt = setup(name, "mlp")
    draws = []

    def closure():
        draws.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
        return problem.closure(opt)()

    opt.step(closure)
    passes = len(draws)
    opt.step(closure)
    first, second = draws[:passes], draws[passes:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize("fail_at", range(4))
@every_method
def test_an_exception_leaves_the_weights(name, fail_at):
    problem, opt = setup(name)
    if fail_at >= METHODS[name].passes_at(2):
        pytest.skip("fewer passes than that")
    train(problem, opt, 2)
    before, steps = problem.weights(), opt.steps
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls > fail_at:
            raise KeyboardInterrupt
        return problem.closure(opt)()

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert torch.equal(problem.weights(), before)
    assert opt.steps == steps
    with pytest.raises(RuntimeError, match="needs a closure"):
        opt.step()  # no direction is lying about
    train(problem, opt, 1)  # and it goes on
    assert not torch.equal(problem.weights(), before)


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_an_interrupt_between_two_blocks_of_a_move_leaves_the_weights(fail_at, monkeypatch):
    """Ctrl-C can come while the backup is half written; the rest of it is not to be restored."""
    monkeypatch.setattr(vectors, "CPU_BLOCK", 1)  # every tensor a block of its own
    problem, opt = setup("fad", "mlp")
    before, calls, add_ = problem.weights(), 0, vectors.add_

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise KeyboardInterrupt
        add_(*args, **kwargs)

    monkeypatch.setattr(vectors, "add_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step(problem.closure(opt))
    assert torch.equal(problem.weights(), before)


@every_method
def test_step_without_a_closure_shows_the_right_code(name):
    _, opt = setup(name)
    with pytest.raises(RuntimeError) as error:
        opt.step()
    assert "def closure():" in str(error.value)
    assert "opt.phases()" in str(error.value)
    assert ("create_graph=True" in str(error.value)) == opt.needs_graph


def test_a_pass_without_a_gradient_after_one_with_is_an_error():
    problem, opt = setup("fad")
    before = problem.weights()
    calls = []

    def closure():
        calls.append(problem.loss())
        if len(calls) == 1:
            calls[0].backward()
        return calls[-1]

    with pytest.raises(RuntimeError, match="Pass 0 produced gradients, but pass 1 did not"):
        opt.step(closure)
    assert torch.equal(problem.weights(), before)


@pytest.mark.parametrize("scaled", [False, True])
@every_method
def test_a_step_without_any_gradient_changes_nothing(name, scaled):
    """As in torch: all experts idle, or everything frozen for a while."""
    problem, opt = setup(name)
    train(problem, opt, 1)
    before, state = problem.weights(), copy.deepcopy(opt.state_dict())
    calls, scaler = [], torch.amp.GradScaler("cpu") if scaled else None

    def closure():
        calls.append(1)
        return problem.loss()

    opt.step(closure, scaler=scaler)
    assert len(calls) == 1
    assert torch.equal(problem.weights(), before)
    after = opt.state_dict()
    assert str(after["state"]) == str(state["state"])
    for phase in opt.phases():
        with phase:
            problem.loss()
    opt.step()
    assert torch.equal(problem.weights(), before)
    assert opt.steps == 3


def test_gam_exact_wants_the_graph():
    problem, opt = setup("gam-exact")

    def closure():
        loss = problem.loss()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="create_graph=True"):
        opt.step(closure)


@every_method
def test_no_graph_survives_the_step(name):
    problem, opt = setup(name)
    train(problem, opt, 1)
    assert all(p.grad is not None and p.grad.grad_fn is None for p in problem.model.parameters())
    assert not any(p.grad.requires_grad for p in problem.model.parameters())


def test_repr_names_the_method_and_its_base():
    _, opt = setup("fad")
    assert repr(opt).startswith("FAD(rho=0.1, alpha=0.3, beta=0.7, base=SGD (")
