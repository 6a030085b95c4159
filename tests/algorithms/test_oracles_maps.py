"""DMG and pAdaIN against their formulas, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from steppe.algorithms import Losses, Prepared, build_algorithm
from tests.algorithms.convolutional import (
    CONVOLUTIONS,
    Domains,
    Maps,
    assert_close,
    by_hand,
    classified,
    domain_numbers,
    losses_of,
    make,
    make_convolutional,
    make_prepared,
)
from tests.algorithms.oracles import (
    SIZES,
    Image,
    assert_equal_losses,
    buffers,
    gradients,
    images_of,
    make_batches,
    mean,
    move,
)

# DMG


def dmg_places(dmg: Any) -> list[str]:
    return [*("stem", "one", "two")[3 - (len(dmg.mask_logits) - 1) :], "features"]


def masked(dmg: Any, images: Sequence[Image], masks: list[list[Tensor]]) -> Maps:
    """Features with each image's masks, one list per place."""
    of_places = dict(zip(dmg_places(dmg), masks, strict=True))

    def after(name: str, xs: Maps) -> Maps:
        if name not in of_places:
            return xs
        return [x * b[:, None, None] for x, b in zip(xs, of_places[name], strict=True)]

    phis = by_hand(dmg.network, images, after)
    return [phi * b for phi, b in zip(phis, of_places["features"], strict=True)]


def probability(m: Tensor) -> Tensor:
    return 1 / (1 + (-m).exp())


def dmg_losses(dmg: Any, domains: Domains, kept: list[list[Tensor]]) -> tuple[Losses, list[Tensor]]:
    """The losses with these masks, and gradients by hand: a mask's goes to its probability."""
    images, numbers = list(chain(*domains)), domain_numbers(domains)
    bits = [[b.clone().requires_grad_() for b in of_place] for of_place in kept]
    risk = mean(losses_of(dmg.network, masked(dmg, images, bits), images))
    overlap = torch.zeros((), dtype=torch.float64)
    for m in dmg.mask_logits:
        pairs = [(probability(m[i]), probability(m[j])) for i, j in combinations(range(3), 2)]
        overlap = overlap + mean((p * q).sum() / (p + q - p * q).sum() for p, q in pairs)
    by_network = gradients(risk, dmg.network)
    by_masks = []
    by_overlap = torch.autograd.grad(overlap, list(dmg.mask_logits))
    for m, of_place, direct in zip(dmg.mask_logits, bits, by_overlap, strict=True):
        by_mask = dmg.penalty * direct
        p = probability(m.detach())
        slopes = torch.autograd.grad(risk, of_place, retain_graph=True)
        for d, slope in zip(numbers, slopes, strict=True):
            by_mask[d] += slope * p[d] * (1 - p[d])
        by_masks.append(by_mask)
    total = (risk + dmg.penalty * overlap).detach()
    parts = {"risk": risk.detach(), "overlap": overlap.detach()}
    return Losses(total, parts), [*by_network, *by_masks]


def drawn(dmg: Any, prepared: Prepared, domains: Domains) -> list[list[Tensor]]:
    """Each image's masks, from the uniform numbers of the step."""
    numbers = domain_numbers(domains)
    pairs = zip(prepared.draws["uniforms"], dmg.mask_logits, strict=True)
    return [
        [(u < probability(m[d])).double() for u, d in zip(us, numbers, strict=True)]
        for us, m in pairs
    ]


@pytest.mark.parametrize(("stages", "dropout"), [(0, 0.0), (0, 0.5), (1, 0.5), (2, 0.0)])
def test_dmg(stages, dropout):
    dmg = make("DMG", dropout, penalty=0.7, stages=stages)
    assert [m.shape[1] for m in dmg.mask_logits] == [*(4, 5, 6)[3 - stages :], 7]
    prepared, domains = make_prepared(dmg)
    kept = drawn(dmg, prepared, domains)
    assert len({tuple(b.tolist()) for b in kept[-1]}) > 10  # each image has its own
    first = dmg(prepared)
    expected, by_hand_ = dmg_losses(dmg, domains, kept)
    assert_equal_losses(dmg, first, expected, by_hand_)

    move(dmg, 2)
    with torch.no_grad():
        for m in dmg.mask_logits:
            m *= -1
    assert_equal_losses(
        dmg, dmg(prepared), *dmg_losses(dmg, domains, drawn(dmg, prepared, domains))
    )
    again, (expected, by_hand_) = dmg(prepared, first=first.aux), dmg_losses(dmg, domains, kept)
    assert_equal_losses(dmg, again, expected, by_hand_)
    assert (again.total - dmg(prepared).total).abs() > 1e-3
    dmg.commit(prepared, {"main": first})
    assert not buffers(dmg)


@pytest.mark.parametrize("stages", [0, 2])
def test_dmgs_risks_and_predictions(stages):
    dmg = make("DMG", 0.5, stages=stages)
    prepared, domains = make_prepared(dmg)
    images = list(chain(*domains))
    losses = losses_of(dmg.network, masked(dmg, images, drawn(dmg, prepared, domains)), images)
    found = dmg.risks(prepared)
    for d in range(3):
        own = zip(losses, domain_numbers(domains), strict=True)
        expected = mean(loss for loss, number in own if number == d)
        for value in (found[d], dmg.risk(prepared, d)):
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)

    dmg.eval()
    with torch.no_grad():
        for m in dmg.mask_logits:
            m -= 0.5  # some probabilities on either side of a half
    (batch,) = make_batches((4,))
    (images,) = images_of([batch], None)

    def predicted(d: int, hard: bool) -> Maps:
        ps = [probability(m[d]) for m in dmg.mask_logits]
        masks = [[(p > 0.5).double() if hard else p] * 4 for p in ps]
        return classified(dmg.network, masked(dmg, images, masks))

    each = [predicted(d, hard=False) for d in range(3)]
    assert_close(dmg.predict(batch.images), [mean(zs) for zs in zip(*each, strict=True)])
    for d in range(3):
        assert 0 < (dmg.mask_logits[-1][d] > 0).sum() < 7
        assert_close(dmg.predict_source(batch.images, d), predicted(d, hard=True))


def test_dmgs_start_and_draws():
    dmg: Any = build_algorithm("DMG", make_convolutional(), 3, stages=1)
    assert all(m.min() >= 0 and m.max() <= 1 for m in dmg.mask_logits)
    assert torch.cat([m.flatten() for m in dmg.mask_logits]).std() > 0.15
    uniforms = [u for _ in range(50) for u in dmg.prepare(make_batches()).draws["uniforms"]]
    assert [u.shape for u in uniforms[:2]] == [(sum(SIZES), 6), (sum(SIZES), 7)]
    values = torch.cat([u.flatten() for u in uniforms])
    assert values.mean() == pytest.approx(0.5, abs=0.015)  # of 10,400: five deviations
    assert values.var() == pytest.approx(1 / 12, abs=0.004)


# pAdaIN


def swapped(partners: dict[str, list[int]], detached: bool = True) -> Callable[[str, Maps], Maps]:
    def after(name: str, xs: Maps) -> Maps:
        if name not in partners or xs[0][0].numel() == 1:
            return xs
        styles = []
        for x in xs:
            rows = x.flatten(1)
            mu = rows.sum(1) / rows.shape[1]
            var = ((rows - mu[:, None]) ** 2).sum(1) / (rows.shape[1] - 1)
            styles.append((mu[:, None, None], (var + 1e-5)[:, None, None] ** 0.5))
        changed = []
        for x, (mu, sigma), j in zip(xs, styles, partners[name], strict=True):
            mu_, sigma_ = (s.detach() if detached else s for s in styles[j])
            changed.append(sigma_ * (x - mu) / (sigma + 1e-5) + mu_)
        return changed

    return after


def padain_loss(padain: Any, prepared: Prepared, domains: Domains, detached: bool = True) -> Tensor:
    draws = prepared.draws["partners"].items()
    partners = {CONVOLUTIONS[number]: partner.tolist() for number, partner in draws}
    images = list(chain(*domains))
    phis = by_hand(padain.network, images, swapped(partners, detached))
    return mean(losses_of(padain.network, phis, images))


@pytest.mark.parametrize(("p", "dropout"), [(1.0, 0.0), (1.0, 0.5), (0.5, 0.0), (0.0, 0.5)])
def test_padain(p, dropout):
    padain = make("pAdaIN", dropout, p=p)
    assert [stage.name for stage in padain.convolutions] == [*CONVOLUTIONS]
    prepared, domains = make_prepared(padain)
    assert len(prepared.draws["partners"]) == {1.0: 4, 0.5: 3, 0.0: 0}[p]
    first = padain(prepared)
    for _ in range(2):  # at these weights, and at others: statistics follow, partners stay
        expected = padain_loss(padain, prepared, domains)
        assert_equal_losses(padain, padain(prepared, first=first.aux), Losses(expected))
        other = padain_loss(padain, prepared, domains, detached=False)
        (a, *_), (b, *_) = gradients(expected, padain), gradients(other, padain)
        assert ((a - b).norm() > 1e-3 * a.norm()) == (p > 0)
        move(padain, 2)
    padain.commit(prepared, {"main": first})
    assert not buffers(padain)
    (batch,) = make_batches((4,))
    logits = classified(padain.network, by_hand(padain.network, *images_of([batch], None)))
    assert_close(padain.eval().predict(batch.images), logits)
    assert_close(padain.predict_source(batch.images, 1), logits)


def test_padains_draws():
    padain = make("pAdaIN", p=0.3)
    steps = [padain.prepare(make_batches()).draws["partners"] for _ in range(400)]
    for number in range(4):
        assert sum(number in step for step in steps) / 400 == pytest.approx(0.3, abs=0.115)
    both = sum({0, 1} <= step.keys() for step in steps) / 400
    assert both == pytest.approx(0.09, abs=0.07)  # five deviations; places are drawn apart
    partners = [tuple(partner.tolist()) for step in steps for partner in step.values()]
    assert all(sorted(partner) == list(range(sum(SIZES))) for partner in partners)
    assert len({*partners}) == len(partners)
