"""What SAM's and FAD's successors have in common with other methods, and what is their own."""

import copy
import itertools
from functools import partial

import pytest
import torch
from pytorch_optimizer import ScheduleFreeAdamW
from torch import nn
from torch.amp.grad_scaler import GradScaler

from steppe.optim import (
    FAD,
    GGAL,
    GSAM,
    MSAM,
    PGN,
    RWP,
    SAGM,
    SAM,
    WSAM,
    CFlat,
    FollowLR,
    FriendlySAM,
    LookSAM,
    VaSSO,
)
from steppe.optim.noise import generator
from steppe.optim.registry import optimizers
from steppe.optim.sam import norm_parameters
from tests.optim import reference, reference_successors as successors
from tests.optim.problems import EVERY, METHODS, NAMING, PROBLEMS, sgd, train
from tests.optim.test_special_cases import base_alone, run, wrapped

BITWISE = {
    "GSAM with alpha 0 is SAM": (wrapped(GSAM, rho=0.2, alpha=0.0), wrapped(SAM, rho=0.2)),
    "F-SAM with sigma 0 is SAM": (wrapped(FriendlySAM, rho=0.2, sigma=0.0), wrapped(SAM, rho=0.2)),
    "VaSSO with tau 1 is SAM": (wrapped(VaSSO, rho=0.2, tau=1.0), wrapped(SAM, rho=0.2)),
    "LookSAM with k 1 is SAM": (wrapped(LookSAM, rho=0.2, k=1), wrapped(SAM, rho=0.2)),
    "PGN is FAD with alpha 1": (
        wrapped(PGN, rho=0.2, alpha=0.3),
        wrapped(FAD, rho=0.2, alpha=1.0, beta=0.3),
    ),
    "WSAM, coupled, is FAD with alpha 1": (
        wrapped(WSAM, rho=0.2, gamma=0.6, decouple=False),
        wrapped(FAD, rho=0.2, alpha=1.0, beta=0.6 / (1.0 - 0.6)),
    ),
    "WSAM with gamma 0.5, coupled, is SAM": (
        wrapped(WSAM, rho=0.2, gamma=0.5, decouple=False),
        wrapped(SAM, rho=0.2),
    ),
    "C-Flat with lam 0 is SAM": (wrapped(CFlat, rho=0.2, lam=0.0), wrapped(SAM, rho=0.2)),
    "MSAM with rho 0 is the base": (wrapped(MSAM, rho=0.0), base_alone),
    "RWP with gamma 0 is the base": (wrapped(RWP, gamma=0.0), base_alone),
    "WSAM with rho 0 is the base": (wrapped(WSAM, rho=0.0), base_alone),
}
CLOSE = {
    "C-Flat is FAD": (
        wrapped(CFlat, rho=0.2, lam=0.4),
        wrapped(FAD, rho=0.2, alpha=1 / 1.4, beta=1.4),
    ),
    "SAGM with alpha 0 is FAD": (
        wrapped(SAGM, rho=0.2, alpha=0.0),
        wrapped(FAD, rho=0.2, alpha=1.0, beta=0.5),
    ),
    "WSAM decoupled is WSAM coupled over plain SGD": tuple(
        lambda p, d=d: WSAM(torch.optim.SGD(p.groups(), 0.1), 0.2, 0.6, d, model=p.model)
        for d in (True, False)
    ),
}


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize("case", BITWISE)
def test_equal_to_the_last_bit(case, problem_name):
    ours, other = (run(problem_name, make) for make in BITWISE[case])
    assert torch.equal(ours[0], other[0])
    assert ours[1] == other[1]  # at the same number of passes


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize("case", CLOSE)
def test_equal_up_to_rounding(case, problem_name):
    ours, other = (run(problem_name, make)[0] for make in CLOSE[case])
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_wsam_pushes_the_weights_after_the_bases_step(problem_name):
    """Decoupled: the momentum sees g0 alone."""
    problem = PROBLEMS[problem_name]()
    opt = WSAM(sgd(problem.groups(lr=0.03)), rho=0.2, gamma=0.6, model=problem.model)
    lr = problem.per_weight(0.03, 0.1) if problem.split else 0.1
    update, theta = reference.SGD(lr, 0.9, 1e-2), problem.weights()
    for t in range(20):
        train(problem, opt, 1, first=t)
        g0 = problem.gradient(theta, t)
        g1 = problem.gradient(theta + 0.2 * g0 / (g0.norm() + reference.XI), t)
        theta = update(theta, g0) - lr * 0.6 / 0.4 * (g1 - g0)
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-10)


def test_looksam_with_alpha_0_is_sam_in_every_kth_step():
    problem, other = PROBLEMS["dropout"](), PROBLEMS["dropout"]()
    opt = LookSAM(sgd(problem.groups()), rho=0.2, k=3, alpha=0.0, model=problem.model)
    alike = SAM(sgd(other.groups()), rho=0.2, model=other.model)
    for t in range(7):
        alike.param_groups[0]["rho"] = 0.2 if t % 3 == 0 else 0.0
        train(problem, opt, 1, first=t)
        train(other, alike, 1, first=t)
        assert torch.equal(problem.weights(), other.weights())


def test_msam_that_follows_its_momentum_is_nesterovs():
    """rho = lr * mu * |v| looks ahead to where the momentum carries the weights."""
    problem = PROBLEMS["mlp"]()
    base = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
    opt = MSAM(base)
    theta, v = problem.weights(), None
    for t in range(10):
        buffers = [s["momentum_buffer"] for s in base.state.values()]
        length = torch.cat([b.reshape(-1) for b in buffers]).norm().item() if buffers else 0.0
        base.param_groups[0]["rho"] = 0.1 * 0.9 * length
        train(problem, opt, 1, first=t)
        ahead = theta if v is None else theta - 0.1 * 0.9 * v
        g = problem.gradient(ahead, t)
        v = g if v is None else 0.9 * v + g
        theta = theta - 0.1 * v
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-11)


def test_msam_reads_adams_momentum_and_needs_one():
    problem = PROBLEMS["mlp"]()
    opt = MSAM(torch.optim.Adam(problem.model.parameters(), lr=0.01), rho=0.3)
    train(problem, opt, 3)
    theta = problem.weights()
    v = torch.cat([s["exp_avg"].reshape(-1) for s in opt.state.values()])
    torch.manual_seed(3)
    for phase in opt.phases():
        with phase:
            ahead = problem.weights()
            problem.loss().backward()
    torch.testing.assert_close(ahead, theta - 0.3 * v / v.norm(), rtol=0, atol=1e-10)
    assert torch.equal(problem.weights(), theta)  # weights never rest perturbed
    with pytest.raises(ValueError, match="momentum"):
        MSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1))


def test_msam_leaves_unused_parameters_alone():
    """The base must not decay a weight that got no gradient."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = MSAM(sgd([used, unused]), rho=0.3)
    for _ in range(3):
        opt.step(lambda: (used**2).sum().backward())
    assert unused.grad is None
    assert torch.equal(unused, torch.ones(3))


def test_sam_on_perturbs_norm_layers_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
    start = copy.deepcopy(model)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, only="norm", model=model)
    seen = []

    def closure():
        seen.append(copy.deepcopy(model.state_dict()))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    opt.step(closure)
    nn.functional.cross_entropy(start(x), y).backward()
    g = torch.cat([start[1].weight.grad, start[1].bias.grad])
    moved = {name: seen[1][name] - seen[0][name] for name in seen[0]}
    expected = 0.3 * g / g.norm()
    torch.testing.assert_close(torch.cat([moved["1.weight"], moved["1.bias"]]), expected)
    assert not any(value.any() for name, value in moved.items() if not name.startswith("1."))


def test_sam_on_everything_is_sam():
    models = [nn.LayerNorm(4).double() for _ in range(2)]
    x = torch.randn(8, 4).double()
    for model, only in zip(models, ("norm", None), strict=True):
        opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, only=only, model=model)
        for _ in range(3):
            opt.step(lambda model=model: (model(x) ** 4).mean().backward())
    assert torch.equal(models[0].weight, models[1].weight)


def test_sam_on_says_what_it_misses():
    model = nn.Linear(2, 1)
    base = sgd(model.parameters())
    with pytest.raises(ValueError, match="pass model=model"):
        SAM(base, only="norm")
    with pytest.raises(ValueError, match="no normalization layer"):
        SAM(base, only="norm", model=model)
    with pytest.raises(ValueError, match="only must be 'norm'"):
        SAM(base, only="bias", model=model)


def test_rho_may_follow_the_learning_rate():
    problem = PROBLEMS["mlp"]()
    base = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    opt = GSAM(base, rho=FollowLR(high=0.6, low=0.2, lr_high=0.1), alpha=0.1)
    radii = []
    for lr in (0.1, 0.05, 0.0):
        base.param_groups[0]["lr"] = lr
        start = problem.weights()
        for phase in opt.phases():
            with phase:
                radii.append((problem.weights() - start).norm().item())
                problem.loss().backward()
        opt.step()
    assert radii[1::2] == pytest.approx([0.6, 0.4, 0.2], rel=1e-9)


def test_a_closure_without_a_name_is_told_so():
    problem = PROBLEMS["mlp"]()
    opt = SAM(sgd(problem.groups()), ascent="ascent")
    before = problem.weights()
    for closure in (problem.closure(opt), lambda batch=(): problem.loss().backward()):
        with pytest.raises(TypeError, match="the loss 'ascent', so the closure needs its name"):
            opt.step(closure)
    assert torch.equal(problem.weights(), before)


@pytest.mark.parametrize("make", [SAM, GSAM, SAGM, FAD])
def test_the_first_gradient_may_be_of_another_loss(make):
    """`step` returns the main loss; the main loss asked for by name changes nothing."""
    (problem, opt), (other, alike) = (
        (p, make(sgd(p.groups()), ascent=ascent, model=p.model))
        for p, ascent in ((PROBLEMS["mlp"](), "ascent"), (PROBLEMS["mlp"](), "main"))
    )
    asked = []

    def closure(name="main"):
        asked.append(name)
        loss = problem.loss()
        loss.backward()
        return loss

    for _ in range(3):
        losses = opt.step(closure).item(), alike.step(other.closure(alike)).item()
        assert losses[0] == losses[1]
    assert torch.equal(problem.weights(), other.weights())
    per_step = len(asked) // 3
    assert asked == ["ascent", *["main"] * (per_step - 1)] * 3


# ---- loss scales and overflows --------------------------------------------------------------

REMEMBERING = [name for name, method in METHODS.items() if method.remembers]


def test_the_tables_have_every_method_of_the_registry():
    wrappers = {spec.name for spec in optimizers.entries() if spec.base is not None}
    assert wrappers | {"wsam-coupled"} == set(EVERY)


def scaled(problem, opt, scale, factor=1.0, only=None):
    """A closure whose loss is multiplied by `factor`, in every pass or in one."""
    passes = itertools.count()

    def closure(name="main"):
        loss = problem.loss(name=name)
        bad = factor if only in (None, next(passes)) else 1.0
        scale.scale(loss * bad).backward(create_graph=opt.needs_graph)
        return loss

    return closure


@pytest.mark.parametrize("name", [name for name in NAMING if name != "gga-l"])
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_disam_takes_its_first_gradient_of_the_ascent_loss(problem_name, name):
    problem = PROBLEMS[problem_name]()
    opt = NAMING[name](sgd(problem.groups()), model=problem.model)
    scale = GradScaler("cpu", enabled=False)
    update, theta = reference.SGD(0.1, 0.9, 1e-2), problem.weights()
    for t in range(20):
        torch.manual_seed(t)
        opt.step(scaled(problem, opt, scale))
        names = itertools.chain(["ascent"], itertools.repeat("main"))
        grad = lambda point, t=t, names=names: problem.gradient(point, t, next(names))  # noqa: E731
        theta = update(theta, NAMING[name].direction(grad, theta))
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in METHODS])
def test_the_others_resume_bit_for_bit(name):
    problem, other = PROBLEMS["dropout"](), PROBLEMS["dropout"]()
    scale = GradScaler("cpu", enabled=False)
    opt = EVERY[name](sgd(problem.groups()), model=problem.model)
    for t in range(6):
        torch.manual_seed(t)
        opt.step(scaled(problem, opt, scale))
        if t == 2:
            other.model.load_state_dict(problem.model.state_dict())
            saved = copy.deepcopy(opt.state_dict())
    again = EVERY[name](sgd(other.groups()), model=other.model)
    again.load_state_dict(saved)
    for t in range(3, 6):
        torch.manual_seed(t)
        again.step(scaled(other, again, scale))
    assert torch.equal(problem.weights(), other.weights())


@pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", EVERY)
def test_changing_loss_scales_equal_the_unscaled_run(name, fused):
    (problem, opt), (other, alike) = (
        (p, EVERY[name](sgd(p.groups(), fused=f), model=p.model))
        for p, f in ((PROBLEMS["dropout"](), fused), (PROBLEMS["dropout"](), None))
    )
    scale = GradScaler("cpu", init_scale=2.0**6, growth_interval=2, growth_factor=8.0)
    off = GradScaler("cpu", enabled=False)
    for t in range(8):
        torch.manual_seed(t)
        opt.step(scaled(problem, opt, scale), scaler=scale)
        scale.update()
        torch.manual_seed(t)
        alike.step(scaled(other, alike, off))
    assert scale.get_scale() > 2.0**12
    torch.testing.assert_close(problem.weights(), other.weights(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused"])
@pytest.mark.parametrize("only", [None, 0, 1], ids=["every pass", "first pass", "second pass"])
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", EVERY)
def test_an_overflow_equals_a_run_without_that_step(name, bad, only, fused):
    """Bit for bit; under a fused base only the counter moves, which LookSAM and noise go by."""
    if fused and name in {"looksam", "rwp", "gga-l"}:
        pytest.skip("goes by the counter")
    if only is not None and only >= EVERY[name].passes_at(bad):
        pytest.skip("fewer passes than that")

    def trained(overflows):
        problem = PROBLEMS["dropout"]()
        opt = EVERY[name](sgd(problem.groups(), fused=fused), model=problem.model)
        scale = GradScaler("cpu", init_scale=2.0**8, growth_interval=100, backoff_factor=0.5)
        for t in range(5):
            if overflows and t == bad:
                torch.manual_seed(99)
                opt.step(scaled(problem, opt, scale, float("inf"), only), scaler=scale)
                scale.update(2.0**8)
            torch.manual_seed(t)
            opt.step(scaled(problem, opt, scale), scaler=scale)
            scale.update()
        return problem.weights(), opt.state_dict()["steppe"]["memory"]

    (weights, memory), (expected, kept) = trained(True), trained(False)
    assert torch.equal(weights, expected)
    torch.testing.assert_close(memory, kept, rtol=0, atol=0)


@pytest.mark.parametrize("name", REMEMBERING)
def test_an_error_in_the_last_pass_leaves_what_is_remembered(name):
    problem = PROBLEMS["mlp"]()
    opt = METHODS[name](sgd(problem.groups()), model=problem.model)
    train(problem, opt, 3)
    before = copy.deepcopy(opt.state_dict()["steppe"])
    with pytest.raises(ZeroDivisionError):
        for phase in opt.phases():
            with phase:
                problem.loss().backward()
                if phase.index + 1 == phase.total:
                    raise ZeroDivisionError
    torch.testing.assert_close(opt.state_dict()["steppe"], before, rtol=0, atol=0)


def test_noise_repeats_with_the_seed_and_differs_between_steps():
    def points(seed):
        problem = PROBLEMS["mlp"]()
        opt = RWP(torch.optim.SGD(problem.groups(), lr=0.0), gamma=0.1, seed=seed)
        found = []
        for _ in range(2):
            for phase in opt.phases():
                with phase:
                    found.append(problem.weights())
                    problem.loss().backward()
            opt.step()
        return found

    first, again, other = points(0), points(0), points(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], first[3])
    assert not torch.equal(first[1], other[1])


def test_rwp_with_alpha_1_takes_one_pass_at_the_perturbed_weights():
    problem = PROBLEMS["mlp"]()
    opt = RWP(sgd(problem.groups()), gamma=0.1, alpha=1.0)
    start, seen = problem.weights(), []
    for phase in opt.phases():
        with phase:
            seen.append(problem.weights())
            problem.loss().backward()
    assert len(seen) == 1
    assert not torch.equal(seen[0], start)
    assert torch.equal(problem.weights(), start)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_gga_l_adds_noise_by_the_disagreement_of_domains(scale):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6).double())
    domains = [torch.randn(6).double() for _ in range(3)]
    losses = [lambda v, d=d: ((v - d) ** 4).sum() for d in domains]
    opt = GGAL(torch.optim.SGD([w], lr=0.01), gamma=0.5, domains=3)
    scaler = GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)

    def closure(name="main"):
        main = sum(loss(w) for loss in losses) / 3
        chosen = main if name == "main" else losses[int(name[-1])](w)
        scaler.scale(chosen).backward()
        return main

    theta = w.detach().clone()
    for t in range(20):
        opt.step(closure, scaler=scaler)
        gradients = [torch.func.grad(loss)(theta) for loss in losses]
        units = [g / g.norm() for g in gradients]
        cosines = [units[i] @ units[j] for i in range(3) for j in range(i)]
        noise = torch.empty_like(theta).normal_(generator=generator(theta.device, 0, t))
        size = 0.5 * (1 - sum(cosines) / 3)
        theta = theta - 0.01 * (sum(gradients) / 3 + size * noise)
        torch.testing.assert_close(w.detach(), theta, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("domains", "cosine"), [(["x", "0", "xy"], 0.5**0.5), (["x", "0"], 1.0)])
def test_gga_l_does_not_count_domains_without_a_gradient(domains, cosine):
    gradients = {"x": [1.0, 0.0], "xy": [3.0, 3.0], "0": [0.0, 0.0]}
    w = nn.Parameter(torch.zeros(2).double())
    opt = GGAL(torch.optim.SGD([w], lr=1.0), gamma=0.5, domains=len(domains))

    def closure(name="main"):
        chosen = "0" if name == "main" else domains[int(name[-1])]
        w.grad = torch.tensor(gradients[chosen]).double()

    opt.step(closure)
    noise = torch.empty_like(w.detach()).normal_(generator=generator(w.device, 0, 0))
    torch.testing.assert_close(w.detach(), -0.5 * (1 - cosine) * noise, rtol=0, atol=1e-11)


def test_gga_l_with_gamma_0_is_the_base_and_otherwise_needs_domains():
    ours, other = run("mlp", wrapped(GGAL, gamma=0.0)), run("mlp", base_alone)
    assert torch.equal(ours[0], other[0])
    problem = PROBLEMS["mlp"]()
    with pytest.raises(ValueError, match="domains must be a whole number >= 2, got None"):
        train(problem, GGAL(sgd(problem.groups())), 1)


@pytest.mark.parametrize("lam", [0.6, 0.9])
def test_f_sam_with_sigma_1_is_the_authors_code(lam):
    """Which subtracts the mean before this step's gradient enters it; the paper does so after."""
    problem = PROBLEMS["mlp"]()
    opt = FriendlySAM(sgd(problem.groups()), rho=0.1, lam=lam)
    update, theta, mean = reference.SGD(0.1, 0.9, 1e-2), problem.weights(), None
    for t in range(20):
        train(problem, opt, 1, first=t)
        g0 = problem.gradient(theta, t)
        ascent = g0 if mean is None else g0 - mean
        mean = g0 if mean is None else lam * mean + (1 - lam) * g0
        g1 = problem.gradient(theta + 0.1 * successors.unit(ascent), t)
        theta = update(theta, g1)
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-10)


def test_sam_over_plain_sgd_on_a_quadratic_has_a_closed_form():
    torch.manual_seed(0)
    root = torch.randn(5, 5).double()
    hessian = root @ root.T
    w = nn.Parameter(torch.randn(5).double())
    theta = w.detach().clone()
    opt = SAM(torch.optim.SGD([w], lr=0.01), rho=0.3)
    for _ in range(20):
        opt.step(lambda: (0.5 * w @ hessian @ w).backward())
        g = hessian @ theta
        theta = theta - 0.01 * (g + 0.3 * hessian @ successors.unit(g))
        torch.testing.assert_close(w.detach(), theta, rtol=0, atol=1e-12)


def test_looksam_and_ratio_do_not_go_together():
    with pytest.raises(ValueError, match="does not support ratio"):
        LookSAM(sgd([nn.Parameter(torch.ones(2))]), k=2, ratio=0.5)


@pytest.mark.parametrize("make", [SAM, GSAM, SAGM, FAD, PGN, CFlat])
def test_a_group_without_a_radius_does_not_count_in_the_norm(make):
    """As if the other group were alone, as far as the perturbation goes."""
    problem = PROBLEMS["mlp"]()
    opt = make(sgd(problem.groups(rho=0.0)), rho=0.3)
    if make is SAGM:
        for group in opt.param_groups:
            group["alpha"] = 0.0
    start, seen = problem.weights(), []
    for phase in opt.phases():
        with phase:
            seen.append(problem.weights() - start)
            problem.loss().backward()
    assert seen[1].norm().item() == pytest.approx(0.3, rel=1e-9)
    assert not (seen[1] * problem.per_weight(1.0, 0.0)).any()


def test_vasso_averages_in_steps_where_a_schedule_says_1_too():
    problem, taus = PROBLEMS["mlp"](), [0.4, 1.0, 0.4, 1.0, 0.4]
    opt = VaSSO(sgd(problem.groups(), lr=0.1), rho=0.1, tau=lambda step: taus[step - 1])
    update, theta, memory = reference.SGD(0.1, 0.9, 1e-2), problem.weights(), {}
    for t, tau in enumerate(taus):
        train(problem, opt, 1, first=t)
        grad = lambda point, t=t: problem.gradient(point, t)  # noqa: E731
        theta = update(theta, successors.vasso(grad, theta, 0.1, tau, memory=memory))
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-10)


def test_f_sams_first_ascent_of_each_parameter_is_along_its_gradient():
    a, late = (nn.Parameter(torch.ones(2).double() * k) for k in (1.0, 2.0))
    opt = FriendlySAM(torch.optim.SGD([a, late], lr=0.01), rho=0.5)
    opt.step(lambda: (a**4).sum().backward())
    start, moved = late.detach().clone(), []

    def closure():
        moved.append(late.detach() - start)
        ((a**4).sum() + (late**4).sum()).backward()

    opt.step(closure)
    assert moved[1].norm() > 0.4


def test_a_group_may_move_for_the_difference_of_another():
    """One group alone is perturbed, and another alone uses what that does to its gradient."""

    def trained(make, *groups):
        p, q = (nn.Parameter(torch.tensor([1.0, 2.0]).double() * k) for k in (1.0, 0.5))
        parts = [{"params": [w], **own} for w, own in zip((p, q), groups, strict=True)]
        opt = make(torch.optim.SGD(parts, lr=0.01))
        points = []

        def closure():
            points.append(p.detach().clone())
            ((p * p).sum() * (q * q).sum()).backward()

        for _ in range(3):
            opt.step(closure)
        return p, q, points

    groups = {"rho": 0.5, "gamma": 0.0}, {"rho": 0.0, "gamma": 0.6}
    *ours, _ = trained(WSAM, *groups)
    *coupled, _ = trained(partial(WSAM, decouple=False), *groups)
    torch.testing.assert_close(ours, coupled, rtol=0, atol=1e-12)
    groups = {"gamma": 0.5, "alpha": 0.0}, {"gamma": 0.0, "alpha": 1.0}
    _, q, points = trained(RWP, *groups)
    expected = torch.tensor([1.0, 2.0]).double() * 0.5
    for noisy in points[1::2]:
        expected = expected - 0.01 * 2 * expected * (noisy @ noisy)
    assert not torch.equal(points[0], points[1])
    torch.testing.assert_close(q.detach(), expected, rtol=0, atol=1e-12)


def test_noise_needs_a_declaration():
    """Without it, the seed would not be saved, and a captured graph would repeat the noise."""

    class Careless(RWP):
        draws = False

    problem = PROBLEMS["mlp"]()
    with pytest.raises(TypeError, match="needs draws = True in its class"):
        train(problem, Careless(sgd(problem.groups())), 1)


def test_msam_says_that_a_base_keeps_its_momentum_elsewhere():
    problem = PROBLEMS["mlp"]()
    opt = MSAM(ScheduleFreeAdamW(problem.model.parameters(), lr=0.01))
    train(problem, opt, 1)
    with pytest.raises(RuntimeError, match="neither momentum_buffer nor exp_avg .it has z"):
        train(problem, opt, 1)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop])
def test_msam_refuses_bases_without_momentum(make):
    with pytest.raises(ValueError, match=f"momentum, and {make.__name__} has none"):
        MSAM(make([nn.Parameter(torch.ones(2))]))


class NormalizedLinear(nn.Linear):
    pass


class LlamaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def test_what_is_a_normalization_layer():
    model = nn.Sequential(
        NormalizedLinear(4, 4), LlamaRMSNorm(), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)
    )
    found = set(norm_parameters([model]))
    assert found == {p for layer in model[1:] for p in layer.parameters()}
    with pytest.warns(UserWarning, match="none of this SAM.s parameters"):
        opt = SAM(sgd(model[0].parameters()), only="norm", model=model)
    calls = []
    opt.step(lambda: calls.append(model(torch.randn(6, 4)).sum().backward()))
    assert len(calls) == 1


def test_the_seed_of_noise_is_saved():
    def noise(opt, w):
        start = w.detach().clone()
        for phase in opt.phases():
            with phase:
                moved = w.detach() - start
                (w**2).sum().backward()
        return moved

    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (RWP(sgd([w]), seed=s) for w, s in zip(weights, (5, 0), strict=True))
    second.load_state_dict(first.state_dict())
    assert torch.equal(noise(first, weights[0]), noise(second, weights[1]))


@pytest.mark.parametrize("name", EVERY)
def test_a_scaler_that_the_phases_did_not_get_is_missed(name):
    """Where it matters: the others' directions scale with the loss."""
    problem, scale = PROBLEMS["dropout"](), GradScaler("cpu")
    opt = EVERY[name](sgd(problem.groups()), model=problem.model)
    for given in (scale, None):
        for phase in opt.phases(given):
            with phase:
                loss = scale.scale(problem.loss(name=phase.loss))
                loss.backward(create_graph=opt.needs_graph)
        if given is None and not opt.scale_free:
            with pytest.raises(RuntimeError, match=r"Write opt.phases\(scaler\)"):
                scale.step(opt)
        else:
            scale.step(opt)
            scale.update()
    assert opt.scale_free == (
        name not in {"sagm", "disam-sagm", "wsam", "f-sam", "vasso", "gga-l", "wsam-coupled"}
    )


@pytest.mark.parametrize("name", ["f-sam", "vasso", "looksam", "wsam"])
@pytest.mark.parametrize("init_scale", [1.0, 2.0**10])
def test_an_overflow_where_nothing_is_perturbed_is_not_kept(name, init_scale):
    empty = nn.Parameter(torch.zeros(0).double())
    p, q = (nn.Parameter(torch.ones(2).double() * k) for k in (1.0, 2.0))
    groups = [{"params": [empty, p]}, {"params": [q], "rho": 0.0}]
    opt = METHODS[name](torch.optim.SGD(groups, lr=0.01, momentum=0.9))
    scale, calls = GradScaler("cpu", init_scale=init_scale), []

    def closure():
        calls.append(len(calls))
        loss = (p * p).sum() * (q * q).sum() + empty.sum()
        scale.scale(loss).backward()
        if len(calls) == 1:
            q.grad.fill_(torch.inf)
        return loss

    for _ in range(6):
        opt.step(closure, scaler=scale)
        scale.update()
    kept = opt.state_dict()["steppe"]["memory"].values()
    assert all(x.isfinite().all() for one in kept for x in one.values())
    assert opt.steps == 5
    assert torch.cat([p, q]).isfinite().all()


def test_asam_without_a_gradient_that_counts_takes_a_plain_step():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [p], "rho": 0.0}, {"params": [q]}]
    SAM(torch.optim.SGD(groups, lr=0.5), adaptive=True).step(lambda: (p * p).sum().backward())
    assert torch.equal(p, torch.zeros(2))
