"""MetaReg: the gradient through the inner steps, what each part of a run changes, and a kill."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from steppe.algorithms import Prepared, build_algorithm
from steppe.algorithms.metareg import MetaReg
from steppe.training import load_model, make_config, train
from steppe.training.trainer import Trainer
from tests.algorithms.oracles import gradients, make_batches, make_network
from tests.training.axes import config


def build(**options: float) -> MetaReg:
    torch.manual_seed(1)
    found = build_algorithm("MetaReg", make_network(dropout=0.5), 3, **options)
    assert isinstance(found, MetaReg)
    with torch.no_grad():
        found.phi.normal_()
    return found.double()


def outer(metareg: MetaReg, prepared: Prepared) -> torch.Tensor:
    return metareg(prepared, "regularizer").total


def head(metareg: MetaReg, domain: int) -> tuple[torch.Tensor, torch.Tensor]:
    linear = metareg.copy.classifier
    return linear.weight[5 * domain : 5 * domain + 5], linear.bias[5 * domain : 5 * domain + 5]


def test_the_gradient_through_one_inner_step() -> None:
    """That is -alpha sign(beta_0) * grad R_b(beta_1)."""
    metareg = build(inner_steps=1, inner_lr=0.3)
    prepared = metareg.prepare(make_batches())
    a, b = prepared.draws["pair"].tolist()
    features = prepared.split(metareg.copy.features(prepared.images, prepared.keep).detach())
    labels = prepared.split(prepared.labels)
    start = [p.detach().clone().requires_grad_() for p in head(metareg, a)]
    loss = F.cross_entropy(F.linear(features[a], *start), labels[a])
    loss = loss + (metareg.phi.detach() * start[0].abs()).sum()
    slopes = torch.autograd.grad(loss, start)
    moved = [(p - 0.3 * g).detach().requires_grad_() for p, g in zip(start, slopes, strict=True)]
    loss = F.cross_entropy(F.linear(features[b], *moved), labels[b])
    expected = -0.3 * start[0].sign() * torch.autograd.grad(loss, moved[0])[0]
    found = outer(metareg, prepared)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(torch.autograd.grad(found, metareg.phi)[0], expected)


def test_the_gradient_through_three_inner_steps_is_that_of_differences() -> None:
    metareg = build(inner_steps=3, inner_lr=0.3)
    prepared = metareg.prepare(make_batches())
    (gradient,) = torch.autograd.grad(outer(metareg, prepared), metareg.phi)
    direction = torch.randn_like(gradient)
    sides = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            metareg.phi.add_(direction, alpha=step)
            sides.append(outer(metareg, prepared))
    expected = (sides[0] - sides[1]) / 2e-6
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-6, atol=0)


def test_the_inner_steps_see_one_domain_and_teach_only_the_penalty() -> None:
    metareg = build(inner_steps=3, inner_lr=0.3)
    prepared = metareg.prepare(make_batches())
    a, b = prepared.draws["pair"]
    used = (prepared.draws["domains"] == a).double()
    x = metareg.copy.features(prepared.images, prepared.keep)
    other = torch.where(used[:, None] > 0, x, torch.randn_like(x))
    first, second = (metareg.inner(rows, prepared.labels, used, a) for rows in (x, other))
    assert all(map(torch.equal, first, second))
    found = outer(metareg, prepared)
    assert all(not g.any() for m in (metareg.copy, metareg.network) for g in gradients(found, m))
    with torch.no_grad():  # the third domain is in neither loss
        prepared.images[(prepared.draws["domains"] != a) & (prepared.draws["domains"] != b)] += 1
    assert torch.equal(outer(metareg, prepared), found)


def test_heads_learn_their_own_domains() -> None:
    metareg = build()
    prepared = metareg.prepare(make_batches())
    features = prepared.split(metareg.copy.features(prepared.images, prepared.keep))
    risks = [
        F.cross_entropy(F.linear(x, *head(metareg, d)), y)
        for d, (x, y) in enumerate(zip(features, prepared.split(prepared.labels), strict=True))
    ]
    found = metareg(prepared, "heads").total
    torch.testing.assert_close(found, torch.stack(risks).mean())
    assert all(not g.any() for g in gradients(found, metareg.network))


def test_without_a_penalty_it_is_erm() -> None:
    metareg = build()
    with torch.no_grad():
        metareg.phi.zero_()
    prepared = metareg.prepare(make_batches())
    erm = build_algorithm("ERM", metareg.network, 3)
    ours, theirs = (a(prepared).total for a in (metareg, erm))
    assert torch.equal(ours, theirs)
    pairs = (gradients(total, metareg.network) for total in (ours, theirs))
    assert all(map(torch.equal, *pairs))


@pytest.mark.parametrize(("share", "steps", "expected"), [(0.5, 7, 3), (0.0, 7, 0), (0.9, 10, 9)])
def test_each_step_belongs_to_one_part(share: float, steps: int, expected: int) -> None:
    metareg = build(share=share, steps=steps)
    active = [[o.name for o in metareg.objectives() if o.active(s)] for s in range(steps)]
    assert active == [["heads", "regularizer"]] * expected + [["main"]] * (steps - expected)
    assert len(active) == steps


def test_a_kill_in_the_first_part_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = config("MetaReg", "adam", {"name": "none"}) | {"checkpoint_every": 2, "steps": 4}
    values["algorithm"] = {"name": "MetaReg", "share": 0.75, "inner_lr": 0.1, "lr_factor": 1.0}
    run = make_config(values)
    assert train(run, tmp_path / "whole")
    step, seen = Trainer.step, []

    def interrupted(self: Trainer, batches: object) -> None:
        step(self, batches)  # type: ignore[arg-type]
        seen.append([n for n, o in zip("hrm", self.objectives, strict=True) if o.active(self.done)])
        if self.done == 2 == len(seen):
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", interrupted)
    with suppress(KeyboardInterrupt):
        train(run, tmp_path / "broken")
    assert seen[-1] == ["h", "r"]
    train(run, tmp_path / "broken", resume=True)
    assert seen[-1] == ["m"], "the run told it how many steps there are"
    whole, broken = (load_model(tmp_path / n, "last").state_dict() for n in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())
    assert any(value.any() for name, value in whole.items() if name.endswith("phi"))
