"""RSC, MixStyle, MIRO and the network's taps: what happens to features, against formulas."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Network, Stage, build_algorithm
from steppe.algorithms.algorithm import trainable
from steppe.errors import UserError
from steppe.training.backbones import build_network
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    SIDE,
    SIZES,
    STD,
    Image,
    assert_equal_losses,
    cross_entropy,
    features,
    images_of,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)

KINDS = ("maps", "tokens", "channels last")
"""Shapes that come out of stages: N x C x H x W, N x L x C, N x H x W x C."""
STAGES = "abcd"
WIDTHS = (5, 6, 7, 8)


class Reshape(nn.Module):
    """Images as the first stage takes them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        last = x if self.kind == "maps" else x.movedim(1, -1)
        return last.flatten(1, 2) if self.kind == "tokens" else last


class Pool(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2) if self.kind == "maps" else x.flatten(1, -2).mean(1)


def make_staged(kind: str = "maps", dropout: float = 0.0) -> Network:
    torch.manual_seed(0)

    def layer(n: int, m: int) -> nn.Module:
        return nn.Conv2d(n, m, 3, padding=1) if kind == "maps" else nn.Linear(n, m)

    parts: OrderedDict[str, nn.Module] = OrderedDict(shape=Reshape(kind))
    for name, n, m in zip(STAGES, (3, *WIDTHS), WIDTHS, strict=False):
        parts[name] = nn.Sequential(layer(n, m), nn.Tanh())
    parts["head"] = nn.Sequential(Pool(kind), nn.Linear(WIDTHS[-1], 9), nn.Tanh())
    dim = 1 if kind == "maps" else -1
    stages = [Stage(name, m, dim) for name, m in zip(STAGES, WIDTHS, strict=True)]
    network = Network(nn.Sequential(parts), 9, N_CLASSES, MEAN, STD, dropout, stages=stages)
    return network.double()


Change = Callable[[int, list[Tensor]], list[Tensor]]


def by_hand(featurizer: Any, images: list[Image], change: Change | None = None) -> list[Tensor]:
    """The features of images, from stage to stage, with something done to all in between."""
    xs = [featurizer.shape(image.pixels[None])[0] for image in images]
    for number, name in enumerate(STAGES):
        xs = [getattr(featurizer, name)(x[None])[0] for x in xs]
        xs = xs if change is None else change(number, xs)
    outputs = [featurizer.head(x[None])[0] for x in xs]
    return [phi * image.keep for phi, image in zip(outputs, images, strict=True)]


def outputs_by_hand(featurizer: Any, images: list[Image]) -> list[list[Tensor]]:
    """What comes out of each stage, for each image."""
    found: list[list[Tensor]] = []

    def look(number: int, xs: list[Tensor]) -> list[Tensor]:
        found.append(xs)
        return xs

    by_hand(featurizer, images, look)
    return found


def risk_of(network: Network, phis: list[Tensor], images: list[Image]) -> Tensor:
    weight, bias = network.classifier.weight, network.classifier.bias
    return mean(
        cross_entropy(weight @ phi + bias, image.label)
        for phi, image in zip(phis, images, strict=True)
    )


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in module.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tap_sees_the_stages_in_order_and_may_replace_what_they_give(kind):
    network = make_staged(kind)
    (batch,) = make_batches((5,))
    (images,) = images_of([batch], None)
    seen: list[tuple[int, Tensor]] = []
    plain = network.features(batch.images, tap=lambda number, x: seen.append((number, x)))
    assert [number for number, _ in seen] == list(range(len(STAGES)))
    for (_, found), expected in zip(seen, outputs_by_hand(network.featurizer, images), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(plain, torch.stack(by_hand(network.featurizer, images)))

    found = network.features(batch.images, tap=lambda number, x: x * 2 if number == 1 else None)
    changed = by_hand(
        network.featurizer, images, lambda number, xs: [x * 2 for x in xs] if number == 1 else xs
    )
    torch.testing.assert_close(found, torch.stack(changed), rtol=1e-12, atol=1e-14)
    assert not hooks(network)
    assert torch.equal(network.features(batch.images), plain)


def test_any_module_can_be_tapped():
    network, x = make_network(), torch.rand(2, 3, SIDE, SIDE, dtype=torch.float64)
    linear = network.featurizer[1]
    seen = []

    def negate(number: int, output: Tensor) -> Tensor:
        seen.append((number, output))
        return -output

    found = network.features(x, tap=negate, at=[Stage("1", linear.out_features), Stage("2", 6)])
    assert [number for number, _ in seen] == [0, 1]
    assert torch.equal(seen[0][1], linear(x.flatten(1)))
    assert torch.equal(found, -(-linear(x.flatten(1))).tanh())
    assert not hooks(network)


def test_domains_of_a_pass():
    network = make_network()
    layer = network.domains  # what a layer keeps
    with network.of_domains(sizes=(2, 3)):
        assert (layer.sizes, layer.only) == ((2, 3), None)
        with pytest.raises(KeyError), network.of_domains(only=1):
            assert (layer.sizes, layer.only) == (None, 1)
            raise KeyError
        assert (layer.sizes, layer.only) == ((2, 3), None)
    assert (layer.sizes, layer.only) == (None, None)


def test_no_hook_stays_behind():
    network = make_staged()
    during = []

    def tap(number: int, x: Tensor) -> None:
        during.append(hooks(network))
        if number == 2:
            raise KeyError("the tap's own")

    with pytest.raises(KeyError, match="the tap's own"):
        network.features(make_batches((2,))[0].images, tap=tap)
    assert during == [len(STAGES)] * 3
    assert not hooks(network)
    with pytest.raises(RuntimeError, match="channels"):
        network.features(torch.zeros(2, 7, SIDE, SIDE, dtype=torch.float64), tap=tap)
    assert not hooks(network)


def test_dropout_multiplies_the_features_that_the_classifier_sees():
    network = make_network(0.25)
    images = torch.rand(2000, 3, SIDE, SIDE, dtype=torch.float64)
    keep = network.draw_mask(images)
    assert keep.shape == (2000, network.n_features)
    assert keep.dtype == torch.float64
    kept = keep[keep != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 4 / 3), rtol=1e-15, atol=0)
    # Of each feature, over images, and of 12,000 together: five deviations.
    assert keep.mean(0).tolist() == pytest.approx([1] * network.n_features, abs=0.065)
    assert keep.mean() == pytest.approx(1, abs=0.027)
    assert not torch.equal(keep, network.draw_mask(images))

    features = network.featurizer(images) * keep
    assert torch.equal(network.features(images, keep), features)
    weight, bias = network.classifier.weight, network.classifier.bias
    torch.testing.assert_close(network(images, keep), features @ weight.T + bias)
    assert network.draw_mask((255 * images).byte()).dtype == torch.get_default_dtype()
    assert network.eval().draw_mask(images) is None
    assert make_network().draw_mask(images) is None


RSC_SIZES = (5, 7, 5)
"""So that no quantile falls on one of the values, where a rounding error decides."""


def rsc_mask(rsc: Any, images: list[Image]) -> Tensor:
    """By autograd and NumPy's percentiles, as in DomainBed."""
    weight, bias = (p.detach() for p in rsc.network.classifier.parameters())
    masks, changes = [], []
    for image in images:
        phi = features(rsc.network, image).detach().requires_grad_()
        logits = weight @ phi + bias
        (g,) = torch.autograd.grad(logits[image.label], phi)
        kept = g < np.percentile(g.numpy(), 100 * (1 - rsc.feature_drop))
        muted = weight @ (phi * kept) + bias
        p, p_muted = (torch.softmax(z, 0)[image.label].item() for z in (logits, muted))
        masks.append(kept)
        changes.append(p - p_muted)
    limit = np.percentile(changes, 100 * (1 - rsc.batch_drop))
    rows = [
        kept if change >= limit else torch.ones_like(kept)
        for kept, change in zip(masks, changes, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        (0.0, {}),
        (0.5, {"feature_drop": 0.45, "batch_drop": 0.2}),
        (0.0, {"feature_drop": 0.0, "batch_drop": 1.0}),  # the highest in every image
    ],
)
def test_rsc_mutes_what_it_relied_on(dropout, options):
    rsc: Any = build_algorithm("RSC", make_network(dropout), len(SIZES), **options).double()
    batches = make_batches(RSC_SIZES)
    prepared = rsc.prepare(batches)
    images = list(chain(*images_of(batches, prepared.keep)))
    muting = rsc_mask(rsc, images)
    losses = rsc(prepared)

    def muted_risk() -> Tensor:
        phis = [features(rsc.network, x) * row for x, row in zip(images, muting, strict=True)]
        return risk_of(rsc.network, phis, images)

    assert torch.equal(losses.aux["mask"].bool(), muting)
    # A quantile is a place between the first value and the last; what is not below it is dropped.
    touched = ~muting.all(1)
    dropped = [6 - math.ceil(5 * (1 - rsc.feature_drop))] * (
        17 - math.ceil(16 * (1 - rsc.batch_drop))
    )
    assert (~muting[touched]).sum(1).tolist() == dropped
    assert_equal_losses(rsc, losses, Losses(muted_risk()))

    # Later passes, at other weights, keep the mask of the first.
    move(rsc, 1)
    move(rsc.network.classifier, 2)
    later = rsc(prepared, first={"mask": losses.aux["mask"].detach()})
    assert_equal_losses(rsc, later, Losses(muted_risk()))
    assert not torch.equal(rsc(prepared).aux["mask"], losses.aux["mask"])
    assert torch.equal(later.aux["mask"], losses.aux["mask"])


def rows_of(maps: Tensor, dim: int) -> Tensor:
    """One image's values, channel by channel."""
    return (maps if dim == 1 else maps.movedim(-1, 0)).flatten(1)


def mixed_by_hand(network: Network, mixes: Any, detached: bool = True) -> Change:
    """Changes what comes out of stages as MixStyle's equations say."""

    def change(number: int, xs: list[Tensor]) -> list[Tensor]:
        if number not in mixes:
            return xs
        dim = network.stages[number].dim
        styles = []
        for x in xs:
            rows = rows_of(x.detach() if detached else x, dim)
            mu = rows.sum(1) / rows.shape[1]
            sigma = (((rows - mu[:, None]) ** 2).sum(1) / rows.shape[1] + 1e-6) ** 0.5
            shape = (-1, 1, 1) if dim == 1 else (-1,)
            styles.append((mu.view(shape), sigma.view(shape)))
        partner, share = mixes[number]
        changed = []
        for i, x in enumerate(xs):
            (mu, sigma), (mu_, sigma_) = styles[i], styles[partner[i]]
            a = share[i]
            mixed_mu, mixed_sigma = a * mu + (1 - a) * mu_, a * sigma + (1 - a) * sigma_
            changed.append(mixed_sigma * (x - mu) / sigma + mixed_mu)
        return changed

    return change


@pytest.mark.parametrize(
    ("kind", "dropout"), [("maps", 0.0), ("tokens", 0.5), ("channels last", 0.0)]
)
def test_mixstyle_mixes_statistics_that_carry_no_gradient(kind, dropout):
    network = make_staged(kind, dropout)
    mixstyle: Any = build_algorithm("MixStyle", network, len(SIZES), p=1.0, alpha=0.7).double()
    batches = make_batches()
    prepared = mixstyle.prepare(batches)
    mixes = prepared.draws["mixes"]
    assert sorted(mixes) == [1, 2]  # neither the stem nor the last
    images = list(chain(*images_of(batches, prepared.keep)))
    phis = by_hand(network.featurizer, images, mixed_by_hand(network, mixes))
    expected = risk_of(network, phis, images)
    assert_equal_losses(mixstyle, mixstyle(prepared), Losses(expected))

    attached = by_hand(network.featurizer, images, mixed_by_hand(network, mixes, detached=False))
    other = risk_of(network, attached, images)
    torch.testing.assert_close(other, expected)  # the test would not notice, but for gradients
    weight = network.featurizer.get_submodule("a")[0].weight
    a, b = (torch.autograd.grad(loss, weight)[0] for loss in (expected, other))
    assert (a - b).norm() > 1e-3 * a.norm()


@pytest.mark.parametrize("case", ["p = 0", "own style"])
def test_mixstyle_without_a_mixture_is_erm(case):
    network = make_staged()
    p = 0.0 if case == "p = 0" else 1.0
    mixstyle = build_algorithm("MixStyle", network, len(SIZES), p=p).double()
    batches = make_batches()
    prepared = mixstyle.prepare(batches)
    mixes = prepared.draws["mixes"]
    assert bool(mixes) == (p == 1)
    own = {n: mix._replace(share=torch.ones_like(mix.share)) for n, mix in mixes.items()}
    prepared = replace(prepared, draws={"mixes": own})
    expected = risk(network, chain(*images_of(batches, None)))
    assert_equal_losses(mixstyle, mixstyle(prepared), Losses(expected))


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_mixstyles_draws(alpha):
    mixstyle = build_algorithm("MixStyle", make_staged(), len(SIZES), p=0.3, alpha=alpha)
    torch.manual_seed(0)
    steps = [mixstyle.prepare(make_batches()).draws["mixes"] for _ in range(400)]
    for number in range(len(STAGES)):
        share = sum(number in mixes for mixes in steps) / len(steps)
        assert share == pytest.approx(0.3 if number in (1, 2) else 0, abs=0.11)  # five deviations
    both = sum(len(mixes) == 2 for mixes in steps) / len(steps)
    assert both == pytest.approx(0.09, abs=0.07)  # stages are drawn apart
    drawn = [mix for mixes in steps for mix in mixes.values()]
    for mix in drawn:
        assert sorted(mix.partner.tolist()) == list(range(sum(SIZES)))
    assert len({tuple(mix.partner.tolist()) for mix in drawn}) == len(drawn)
    shares = torch.stack([mix.share for mix in drawn])
    assert shares.shape[1] == sum(SIZES)
    variance = 1 / (4 * (2 * alpha + 1))
    assert shares.mean() == pytest.approx(0.5, abs=5 * math.sqrt(variance / shares.numel()))
    assert shares.var() == pytest.approx(variance, rel=0.1)
    # Each image has its own.
    assert shares.var(1).mean() == pytest.approx(variance, rel=0.1)


def test_mixstyle_mixes_the_first_of_two_stages():
    network = make_staged()
    network.stages = network.stages[:2]
    mixstyle = build_algorithm("MixStyle", network, len(SIZES), p=1.0).double()
    assert list(mixstyle.prepare(make_batches()).draws["mixes"]) == [0]


@pytest.mark.parametrize(("name", "stages"), [("MixStyle", 1), ("MixStyle", 0), ("MIRO", 0)])
def test_stages_are_needed(name, stages):
    network = make_staged()
    network.stages = network.stages[:stages]
    with pytest.raises(UserError, match=rf"'{name}'.*stages.*choose a ResNet"):
        build_algorithm(name, network, len(SIZES))


def move_trained(miro: Any, seed: int) -> None:
    move(miro.network, seed)
    move(miro.raw_variances, seed + 1)


def miro_penalty(miro: Any, first: nn.Module, images: list[Image]) -> Tensor:
    network = miro.network
    now, then = (outputs_by_hand(f, images) for f in (network.featurizer, first))
    total = torch.zeros((), dtype=torch.float64)
    for stage, raw, xs, xs0 in zip(network.stages, miro.raw_variances, now, then, strict=True):
        variance = (1 + raw.exp()).log() + 1e-5
        terms = []
        for x, x0 in zip(xs, xs0, strict=True):
            rows = zip(
                rows_of(x, stage.dim), rows_of(x0.detach(), stage.dim), variance, strict=True
            )
            terms += [(f - f0) ** 2 / v + v.log() for f, f0, v in rows]
        total = total + torch.cat(terms).mean() / 2
    return total


@pytest.mark.parametrize(("kind", "dropout"), [*((k, 0.0) for k in KINDS), ("maps", 0.5)])
def test_miro_stays_close_to_its_first_network(kind, dropout):
    network = make_staged(kind, dropout)
    first = copy.deepcopy(network.featurizer)
    miro: Any = build_algorithm("MIRO", network, len(SIZES), penalty=0.3).double()
    batches = make_batches()
    start = miro(miro.prepare(batches)).parts["penalty"]  # no distance yet, variances of 0.1
    assert start.item() == pytest.approx(len(STAGES) * math.log(0.1) / 2, rel=1e-6)
    for step in range(2):
        move_trained(miro, step)
        batches = make_batches(seed=step)
        prepared = miro.prepare(batches)
        images = list(chain(*images_of(batches, prepared.keep)))
        penalty, plain = miro_penalty(miro, first, images), risk(network, images)
        expected, losses = plain + 0.3 * penalty, miro(prepared)
        torch.testing.assert_close(losses.total, expected, rtol=1e-9, atol=0)
        torch.testing.assert_close(losses.parts["penalty"], penalty, rtol=1e-9, atol=0)
        torch.testing.assert_close(losses.parts["risk"], plain, rtol=1e-9, atol=0)
        learned = [*trainable(miro)]
        assert {*learned} == {*network.parameters(), *miro.raw_variances}
        found, right = (torch.autograd.grad(t, learned) for t in (losses.total, expected))
        for a, b in zip(found, right, strict=True):
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_miro_without_a_penalty_is_erm():
    miro: Any = build_algorithm("MIRO", make_staged(), len(SIZES), penalty=0.0).double()
    move_trained(miro, 1)
    batches = make_batches()
    expected = risk(miro.network, chain(*images_of(batches, None)))
    found = miro(miro.prepare(batches)).total
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    parameters = list(miro.network.parameters())
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_miros_variances_learn_faster_and_its_first_network_not_at_all():
    miro: Any = build_algorithm("MIRO", make_staged(), len(SIZES), lr_factor=7.0)
    (objective,) = miro.objectives()
    assert objective.lr_factors == dict.fromkeys(miro.raw_variances, 7.0)
    assert [len(raw) for raw in miro.raw_variances] == list(WIDTHS)
    assert {*objective.parameters} == {*miro.network.parameters(), *miro.raw_variances}
    assert not any(p.requires_grad for p in miro.first_featurizer.parameters())


def test_miros_first_network_never_changes_and_looks_once_at_a_step():
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=8, freeze_bn=False)
    network.featurizer.insert(3, nn.Dropout2d(0.5))
    network.stages = (Stage("2", 16), Stage("6", 32))
    miro: Any = build_algorithm("MIRO", network, len(SIZES)).double()
    first = miro.first_featurizer
    kept = copy.deepcopy(first.state_dict())
    calls: list[int] = []
    first.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    (objective,) = miro.objectives()
    optimizer = torch.optim.SGD(objective.parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = [batch._replace(images=batch.images.repeat(1, 1, 2, 2)) for batch in make_batches()]
    outputs = []
    for step in range(3):
        if step:  # as an evaluation between two steps does; not before the first
            miro.eval()
            miro.train()
        assert not any(module.training for module in first.modules())
        assert network.featurizer[3].training
        prepared = miro.prepare(batches)
        outputs.append(prepared.draws["first outputs"])
        assert not any(x.requires_grad for x in outputs[-1])
        for _ in range(4):
            optimizer.zero_grad()
            losses = miro(prepared)
            losses.total.backward()
        optimizer.step()
        miro.commit(prepared, {"main": losses})
        assert calls == [sum(SIZES)] * (step + 1)
    trained = network.featurizer.state_dict()
    for name, value in first.state_dict().items():
        assert torch.equal(value, kept[name]), name
        assert not torch.equal(value, trained[name]), name
    assert all(p.grad is None for p in first.parameters())
    for now, then in zip(outputs[-1], outputs[0], strict=True):
        assert torch.equal(now, then)
    assert not hooks(network)
    assert {f"first_featurizer.{name}" for name in kept} <= set(miro.state_dict())
