"""Methods that are to come: the engine must not need a change for them."""

import torch
from torch import nn

from steppe.optim import FlatnessOptimizer, vectors
from steppe.optim.walk import Visit
from tests.optim.problems import PROBLEMS, train

XI = 1e-12


def unit(v):
    return v / (v.norm() + XI)


class Method(FlatnessOptimizer):
    """A method in a few lines: named hyperparameters and its list of visits."""

    stages: tuple = ()

    def __init__(self, base, **hyper):
        super().__init__(base, hyper)

    def visits(self, coefficients):
        return self.stages


class CFlat(Method):
    """g1 + lambda (g3 - g2) at FAD's four points."""

    def _0(w, g0):
        A = w.hold(g0)
        w.climb(A, "rho", spend=False)
        return (A,)

    def _1(w, g1, g0):
        h0 = list(torch._foreach_sub(g1, g0))
        w.jump(h0, "rho")
        return (w.hold(g1),)

    def _2(w, g2, A):
        w.add_(A, g2, "lam", sign=-1.0)
        w.climb(g2, "rho")
        return (A,)

    def _3(w, g3, A):
        return (w.add_(A, g3, "lam"),)

    stages = (Visit(_0), Visit(_1), Visit(_2), Visit(_3))

    @staticmethod
    def reference(grad, theta, rho, lam):
        g0 = grad(theta)
        g1 = grad(theta + rho * unit(g0))
        theta2 = theta + rho * unit(g1 - g0)
        g2 = grad(theta2)
        return g1 + lam * (grad(theta2 + rho * unit(g2)) - g2)


class GSAM(Method):
    """g1 minus alpha times the part of g0 orthogonal to g1."""

    def _0(w, g0):
        held = w.hold(g0)
        w.climb(held, "rho", spend=False)
        return (held,)

    def _1(w, g1, g0):
        scratch = vectors.like(g1)
        along = w.dot(g0, g1, scratch=scratch) / w.norm(g1) ** 2
        vectors.add_(g0, g1, -along)
        return (w.add_(g1, g0, "alpha", sign=-1.0),)

    stages = (Visit(_0), Visit(_1))

    @staticmethod
    def reference(grad, theta, rho, alpha):
        g0 = grad(theta)
        g1 = grad(theta + rho * unit(g0))
        return g1 - alpha * (g0 - (g0 @ g1) / (g1 @ g1) * g1)


class SAGM(Method):
    """Half of g0 + g1, with g1 at theta + (rho / |g0| - alpha) g0."""

    def _0(w, g0):
        held = w.hold(g0)
        w.climb(held, "rho", spend=False)
        w.add_(w.theta, held, "alpha", sign=-1.0)
        return (held,)

    def _1(w, g1, g0):
        torch._foreach_lerp_(g0, g1, 0.5)
        return (g0,)

    stages = (Visit(_0), Visit(_1))

    @staticmethod
    def reference(grad, theta, rho, alpha):
        g0 = grad(theta)
        return 0.5 * (g0 + grad(theta + rho * unit(g0) - alpha * g0))


class FSAM(Method):
    """Ascent along g0 minus sigma times a moving average of g0 that lives from step to step."""

    def _0(w, g0):
        m = w.remembered("m")
        torch._foreach_lerp_(m, g0, 0.1)
        w.add_(g0, m, "sigma", sign=-1.0)
        w.climb(g0, "rho")
        return ()

    def _1(w, g1):
        return (g1,)

    stages = (Visit(_0), Visit(_1))


class LookSAM(Method):
    """SAM every k-th step; between, g0 plus the remembered part of g1 orthogonal to g0."""

    def _0(w, g0):
        held = w.hold(g0)
        w.climb(held, "rho", spend=False)
        return (held,)

    def _1(w, g1, g0):
        gv = w.remembered("gv")
        torch._foreach_copy_(gv, g1)
        along = w.dot(g1, g0, scratch=vectors.like(g0)) / w.norm(g0) ** 2
        vectors.add_(gv, g0, -along)
        return (g1,)

    def _reuse(w, g0):
        gv = w.remembered("gv")
        vectors.add_(g0, gv, 0.7 * w.norm(g0) / (w.norm(gv) + XI))
        return (g0,)

    def visits(self, coefficients):
        if self.steps % 3 == 0:
            return (Visit(LookSAM._0), Visit(LookSAM._1))
        return (Visit(LookSAM._reuse),)


class DISAM(Method):
    """SAM whose ascent loss is not the descent loss: the closure is asked for it by name."""

    def _0(w, g0):
        w.climb(g0, "rho")
        return ()

    def _1(w, g1):
        return (g1,)

    stages = (Visit(_0, loss="ascent"), Visit(_1))


def one_step(cls, **hyper):
    problem = PROBLEMS["mlp"]()
    theta = problem.weights()
    opt = cls(torch.optim.SGD(problem.model.parameters(), lr=1.0), **hyper)
    train(problem, opt, 1)
    expected = theta - cls.reference(lambda p: problem.gradient(p, 0), theta, *hyper.values())
    torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-12)


def test_c_flat():
    one_step(CFlat, rho=0.1, lam=0.4)


def test_gsam():
    one_step(GSAM, rho=0.1, alpha=0.3)


def test_sagm():
    one_step(SAGM, rho=0.1, alpha=0.05)


def test_f_sam_remembers_across_steps_and_checkpoints():
    problem = PROBLEMS["mlp"]()
    theta, m = problem.weights(), torch.zeros_like(problem.weights())
    opt = FSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), rho=0.1, sigma=0.5)
    for t in range(6):
        if t == 3:  # resume from a checkpoint in the middle
            saved = opt.state_dict()
            opt = FSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), rho=0.1, sigma=0.5)
            opt.load_state_dict(saved)
        train(problem, opt, 1, first=t)
        grad = lambda p, t=t: problem.gradient(p, t)  # noqa: E731
        g0 = grad(theta)
        m = m + 0.1 * (g0 - m)
        theta = theta - 0.1 * grad(theta + 0.1 * unit(g0 - 0.5 * m))
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-12)


def test_look_sam_skips_passes():
    problem = PROBLEMS["mlp"]()
    theta, gv = problem.weights(), None
    opt = LookSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), rho=0.1)
    for t in range(7):
        train(problem, opt, 1, first=t)
        g0 = problem.gradient(theta, t)
        if t % 3 == 0:
            direction = problem.gradient(theta + 0.1 * unit(g0), t)
            gv = direction - (direction @ g0) / (g0 @ g0) * g0
        else:
            direction = g0 + 0.7 * g0.norm() * unit(gv)
        theta = theta - 0.1 * direction
        torch.testing.assert_close(problem.weights(), theta, rtol=0, atol=1e-12)


def test_disam_names_its_loss():
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    losses = {"main": lambda v: (v**3).sum(), "ascent": lambda v: (v[0] * v[1]) ** 2}
    asked = []

    def closure(loss="main"):
        asked.append(loss)
        value = losses[loss](w)
        value.backward()
        return value

    start = w.detach().clone()
    DISAM(torch.optim.SGD([w], lr=0.1), rho=0.2).step(closure)
    ascent = torch.func.grad(losses["ascent"])(start)
    expected = start - 0.1 * torch.func.grad(losses["main"])(start + 0.2 * unit(ascent))
    torch.testing.assert_close(w.detach(), expected, rtol=0, atol=1e-12)
    assert asked == ["ascent", "main"]
