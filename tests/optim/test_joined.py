"""Joined optimizers: what each would do alone, in one object."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

from steppe.optim import FAD, SAM, AdaHessian, Joined
from tests.optim import reference
from tests.optim.problems import PROBLEMS, Problem, mlp, train, twin

PAIRS = ["sgd", "muon"]


def parts(problem: Problem, first: str = "sgd") -> tuple[Optimizer, Optimizer]:
    """An optimizer for the matrices, and AdamW for the rest in two groups."""
    params = list(problem.model.parameters())
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    groups = [{"params": others[:1]}, {"params": others[1:], "lr": 2e-2}]
    adamw = AdamW(groups, lr=1e-2)
    if first == "muon":
        return Muon(matrices, lr=0.02), adamw
    return SGD(matrices, lr=0.1, momentum=0.9), adamw


def gradients(problem: Problem, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
    problem.model.zero_grad()
    loss = problem.loss()
    scale(loss).backward()
    return loss


def closure_of(problem: Problem) -> Callable[[], Tensor]:
    return lambda: gradients(problem)


def steps(problem: Problem, *optimizers: Optimizer, count: int = 3) -> None:
    for _ in range(count):
        gradients(problem)
        for one in optimizers:
            one.step()


@pytest.mark.parametrize("first", PAIRS)
def test_a_step_is_each_optimizers_own(first: str) -> None:
    problem, other = mlp(), mlp()
    joined = Joined(parts(problem, first))
    steps(problem, joined)
    steps(other, *parts(other, first))
    assert torch.equal(problem.weights(), other.weights())
    loss = joined.step(closure_of(problem))
    assert loss.item() == other.loss().item()
    joined.zero_grad()
    assert all(p.grad is None for p in problem.model.parameters())


@pytest.mark.parametrize("first", PAIRS)
def test_resuming_is_bit_identical(first: str) -> None:
    problem = mlp()
    joined = Joined(parts(problem, first))
    steps(problem, joined)
    other = twin(problem)
    saved = copy.deepcopy(joined.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2], [3]]
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    assert set(saved) == {"state", "param_groups"}
    resumed = Joined(parts(other, first))
    for group in resumed.param_groups:
        group["lr"] = 0.0  # what is loaded wins
    resumed.load_state_dict(saved)
    steps(problem, joined)
    steps(other, resumed)
    assert torch.equal(problem.weights(), other.weights())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    problem = mlp()
    sgd, adamw = parts(problem)
    joined = Joined([sgd, adamw])
    steps(problem, joined)
    wrong = Joined([adamw, sgd]).state_dict()
    before = copy.deepcopy(joined.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[1, 1, 2\].*have \[2, 1, 1\]"):
        joined.load_state_dict(wrong)
    torch.testing.assert_close(joined.state_dict(), before, rtol=0, atol=0)


def test_what_an_optimizer_saves_beyond_torchs_format_is_kept() -> None:
    class Counting(SGD):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]
            super().load_state_dict(state_dict)

    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    counting = Counting([b], lr=0.1)
    counting.count = 3
    saved = Joined([SGD([a], lr=0.1), counting]).state_dict()
    other = Counting([b], lr=0.1)
    Joined([SGD([a], lr=0.1), other]).load_state_dict(saved)
    assert other.count == 3


def test_schedulers_and_edits_act_on_the_optimizers() -> None:
    problem, other = mlp(), mlp()
    joined, alone = Joined(parts(problem)), parts(other)
    scheduler = StepLR(joined, step_size=1, gamma=0.5)
    schedulers = [StepLR(one, step_size=1, gamma=0.5) for one in alone]
    for _ in range(3):
        steps(problem, joined, count=1)
        steps(other, *alone, count=1)
        for one in (scheduler, *schedulers):
            one.step()
    assert [g["lr"] for g in joined.param_groups] == [0.0125, 0.00125, 0.0025]
    assert torch.equal(problem.weights(), other.weights())
    joined.param_groups[0]["lr"] = 7.0
    assert joined.optimizers[0].param_groups[0]["lr"] == 7.0
    joined.param_groups = [{**group, "lr": 1.0} for group in joined.param_groups]
    assert [g["lr"] for one in joined.optimizers for g in one.param_groups] == [1.0] * 3
    with pytest.raises(ValueError, match="has 3 parameter groups, got 1"):
        joined.param_groups = joined.param_groups[:1]


def test_the_state_is_theirs() -> None:
    problem = mlp()
    sgd, adamw = parts(problem)
    joined = Joined([sgd, adamw])
    p, q = sgd.param_groups[0]["params"][0], adamw.param_groups[0]["params"][0]
    assert joined.state.get(p) is None
    assert joined.state.pop(p, 5) == 5
    assert p not in joined.state  # none of these made an entry
    assert len(joined.state) == len(sgd.state) == 0
    with pytest.raises(KeyError):
        joined.state.pop(p)
    joined.state[p]["momentum_buffer"] = torch.ones_like(p)
    joined.state[q] = {"mine": 1}
    assert joined.state.setdefault(q, {}) == {"mine": 1}
    assert list(joined.state) == [p, q]
    assert torch.equal(sgd.state[p]["momentum_buffer"], torch.ones_like(p))
    assert adamw.state == {q: {"mine": 1}}
    del joined.state[q]
    assert not adamw.state
    with pytest.raises(KeyError, match="joined optimizers"):
        joined.state[torch.ones(1)]
    joined.state = {q: {"mine": 2}}
    assert (dict(sgd.state), dict(adamw.state)) == ({}, {q: {"mine": 2}})


def fad_of(problem: Problem, first: str = "sgd", **options: Any) -> FAD:
    return FAD(Joined(parts(problem, first)), rho=0.1, alpha=0.3, beta=0.7, **options)


@pytest.mark.parametrize("first", PAIRS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_fad_hands_its_direction_to_all(name: str, first: str) -> None:
    problem = PROBLEMS[name]()
    opt = fad_of(problem, first, model=problem.model)
    handed: list[Tensor] = []

    def look(joined: Optimizer, *_: Any) -> None:
        assert joined is opt.base
        handed.append(torch.cat([p.grad.reshape(-1) for p in problem.model.parameters()]))

    opt.register_step_pre_hook(look)
    for t in range(5):
        theta = problem.weights()
        train(problem, opt, 1, first=t)

        def grad(point: Tensor, t: int = t) -> Tensor:
            return problem.gradient(point, seed=t)

        expected = reference.fad(grad, theta, 0.1, 0.3, 0.7)
        torch.testing.assert_close(handed[t], expected, rtol=1e-10, atol=1e-12)
        assert not torch.equal(problem.weights(), theta)
    assert len(handed) == 5


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_copies_go_on_as_the_original_does(clone: Callable[[Any], Any], scheduled: bool) -> None:
    problem = mlp()
    opt = fad_of(problem)
    if scheduled:  # torch's schedulers patch `step` on the instance
        StepLR(opt.base, step_size=1)
    train(problem, opt, 2)
    other, copied = clone((problem, opt))
    assert copied.base.optimizers[0] is not opt.base.optimizers[0]
    for pair in ((problem, opt), (other, copied)):
        train(*pair, 2, first=2)
    assert torch.equal(problem.weights(), other.weights())
    train(other, copied, 1)
    assert not torch.equal(problem.weights(), other.weights())


def test_a_wrapper_over_it_resumes_bit_for_bit() -> None:
    problem = mlp()
    opt = fad_of(problem)
    train(problem, opt, 2)
    other = twin(problem)
    resumed = fad_of(other)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for pair in ((problem, opt), (other, resumed)):
        train(*pair, 2, first=2)
    assert resumed.steps == 4
    assert torch.equal(problem.weights(), other.weights())


def test_a_wrapper_sees_the_options_of_all() -> None:
    problem = mlp()
    params = list(problem.model.parameters())
    rmsprop = torch.optim.RMSprop(params[2:], lr=1e-3)
    joined = Joined([SGD(params[:2], lr=0.1), rmsprop])
    opt = FAD(joined, rho=0.1, alpha=0.3)
    assert rmsprop.param_groups[0]["alpha"] == 0.99
    assert [group["fad_alpha"] for group in opt.param_groups] == [0.3, 0.3]
    assert joined.defaults["lr"] == 0.1


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_all_or_none(wrapped: bool, fused: bool) -> None:
    """The overflow is in one optimizer's gradients alone."""
    problem, unscaled = mlp(), mlp()

    def build(of: Problem) -> Any:
        params = list(of.model.parameters())
        first = AdamW(params[:2], lr=1e-2, fused=fused)
        joined = Joined([first, SGD(params[2:], lr=0.1, momentum=0.9)])
        return SAM(joined, rho=0.1) if wrapped else joined

    opt, plain = build(problem), build(unscaled)
    scaler = GradScaler("cpu", init_scale=2.0**10)

    def step(broken: bool) -> None:
        def closure() -> Tensor:
            loss = gradients(problem, scaler.scale)
            if broken:
                problem.model[2].bias.grad[0] = float("inf")
            return loss

        if wrapped:
            opt.step(closure, scaler=scaler)
        else:
            closure()
            scaler.step(opt)
        scaler.update()

    step(broken=False)
    before = problem.weights()
    step(broken=True)
    assert torch.equal(problem.weights(), before)
    assert scaler.get_scale() == 2.0**9
    step(broken=False)
    for _ in range(2):
        plain.step(closure_of(unscaled))
    torch.testing.assert_close(problem.weights(), unscaled.weights(), rtol=0, atol=1e-12)


def test_hooks_fire_once_per_step() -> None:
    problem = mlp()
    joined = Joined(parts(problem))
    seen: list[str] = []

    def fewer(_: Any, args: Any, kwargs: Any) -> Any:
        seen.append("pre")
        return (args[0], None), kwargs  # drops the closure

    joined.register_step_pre_hook(fewer)
    joined.register_step_post_hook(lambda *_: seen.append("post"))
    joined.optimizers[1].register_step_post_hook(lambda *_: seen.append("one"))
    joined.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    joined.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    joined.register_load_state_dict_pre_hook(lambda _, saved: seen.append(saved["more"]))
    joined.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    gradients(problem)
    assert joined.step(closure_of(problem)) is None
    joined.load_state_dict(joined.state_dict())
    assert seen == ["pre", "one", "post", "saving", 1, "loaded"]


def test_train_and_eval_reach_the_optimizers_that_have_them() -> None:
    class ScheduleFree(SGD):
        mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    free = ScheduleFree([a], lr=0.1)
    opt = SAM(Joined([free, SGD([b], lr=0.1)]))
    assert not hasattr(opt, "train")
    opt.eval()
    assert free.mode == "eval"


def test_what_cannot_be_joined_is_refused() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    sgd = SGD([a], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\) belongs to both SGD and AdamW"):
        Joined([sgd, AdamW([b, a])])
    with pytest.raises(ValueError, match="at least one"):
        Joined([])
    with pytest.raises(TypeError, match=r"wrap the result: SAM\(Joined"):
        Joined([SAM(sgd)])
    with pytest.raises(TypeError, match="LBFGS, which itself needs a closure"):
        Joined([sgd, torch.optim.LBFGS([b])])
    with pytest.raises(TypeError, match="AdaHessian, which differentiates"):
        Joined([sgd, AdaHessian([b])])
    with pytest.raises(TypeError, match="takes torch optimizers, got Linear"):
        Joined([nn.Linear(1, 1)])  # type: ignore[list-item]
    joined = Joined([sgd])
    for refusing in (joined, FAD(joined)):
        with pytest.raises(TypeError, match=r"optimizers\[0\].add_param_group"):
            refusing.add_param_group({"params": [b]})
    joined.optimizers[0].add_param_group({"params": [b]})
    assert len(joined.param_groups) == 2
