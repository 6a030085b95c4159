"""Under autocast, what algorithms make of half-precision features is computed in full precision.

The references take features or logits as rounded as they are, and go on from there in float64. A
penalty that was itself computed in half precision is off by more than 1e-3.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Network, Prepared, build_algorithm
from steppe.algorithms.mixstyle import Mix, mix_styles
from tests.algorithms.oracles import SIZES, Image, cross_entropy, make_batches, make_network, mean
from tests.algorithms.test_adversarial import discriminator_loss, make_algorithm, make_prepared
from tests.algorithms.test_features import RSC_SIZES, make_staged, mixed_by_hand, move_trained
from tests.algorithms.test_penalties import ORACLES, PENALTIES, Oracle, name_of

RTOL = 1e-5


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def watched(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What goes into a module and what comes out of it, call by call."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(
        lambda module, args, output: seen.append((args[0].detach(), output.detach()))
    )
    yield seen
    handle.remove()
    assert {x.dtype for pair in seen for x in pair} == {torch.bfloat16}


def after(network: Network, logits: bool = False) -> Network:
    """A float64 network that is given features, or logits, for pixels."""
    rest = copy.deepcopy(network).double()
    rest.featurizer = nn.Identity()
    if logits:
        rest.n_features = rest.n_classes
        rest.classifier = nn.Linear(rest.n_classes, rest.n_classes).double()
        nn.init.eye_(rest.classifier.weight)
        nn.init.zeros_(rest.classifier.bias)
    return rest


def rows(values: Tensor, prepared: Prepared) -> list[list[Image]]:
    """Features, or logits, as the images of each domain."""
    pairs = zip(values.double(), prepared.labels.tolist(), strict=True)
    images = iter([Image(row, label, 1.0) for row, label in pairs])
    return [[next(images) for _ in range(n)] for n in prepared.sizes]


@pytest.mark.parametrize("oracle", [o for o in ORACLES if name_of(o) in PENALTIES], ids=name_of)
def test_penalties(oracle: Oracle):
    algorithm = build_algorithm(name_of(oracle), make_network(), 3, **oracle.options).float()
    with half(), watched(algorithm.network.classifier) as seen:
        prepared = algorithm.prepare(make_batches())
        losses = algorithm(prepared)
    ((features, logits),) = seen
    from_logits = name_of(oracle) in ("IRM", "VREx")
    network = after(algorithm.network, from_logits)
    oracle.start(network, 3)
    expected = oracle(network, rows(logits if from_logits else features, prepared))
    found = losses.parts["penalty"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.parts["penalty"], rtol=RTOL, atol=0)
    for name, value in losses.state.items():
        torch.testing.assert_close(
            value.double(), expected.state[name].double(), rtol=RTOL, atol=1e-8
        )


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_gradient_penalties(name: str):
    algorithm: Any = make_algorithm(name, grad_penalty=10.0).float()
    with half(), watched(algorithm.network.classifier) as seen:
        prepared, _ = make_prepared(algorithm)
        found = algorithm(prepared).parts["adversary"], algorithm(prepared, "discriminator").total
    ((features, _),) = seen
    rest = copy.deepcopy(algorithm).double()
    rest.network = after(algorithm.network)
    expected = discriminator_loss(rest, rows(features, prepared), (), frozen=True)
    for value in found:
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=RTOL, atol=0)


def test_miros_distance():
    miro: Any = build_algorithm("MIRO", make_staged().float(), len(SIZES)).float()
    move_trained(miro, 1)
    outputs: list[Tensor] = []
    with half():
        prepared = miro.prepare(make_batches())
        miro.network.features(prepared.images, tap=lambda number, x: outputs.append(x.detach()))
        found = miro(prepared).parts["penalty"]
    expected = 0.0
    for now, then, raw in zip(
        outputs, prepared.draws["first outputs"], miro.raw_variances, strict=True
    ):
        assert now.dtype == then.dtype == torch.bfloat16
        variance = ((1 + raw.double().exp()).log() + 1e-5).view(-1, 1, 1)
        squares = (now.double() - then.double()) ** 2
        expected += (squares / variance + variance.log()).mean() / 2
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("seed", range(10))
def test_rscs_mask(seed: int):
    """Differences of probabilities, put in order: rounded, some images would change places."""
    rsc: Any = build_algorithm("RSC", make_network(), len(SIZES)).float()
    with half(), watched(rsc.network.classifier) as seen:
        prepared = rsc.prepare(make_batches(RSC_SIZES, seed))
        found = rsc(prepared).aux["mask"]
    (features, whole), (_, muted), (left, _) = seen
    slopes = rsc.network.classifier.weight.detach().double()[prepared.labels].numpy()
    kept = slopes < np.percentile(slopes, 100 * (1 - rsc.feature_drop), axis=1, keepdims=True)
    p, p_muted = (
        np.array([z[y] for z, y in zip(x.double().softmax(1), prepared.labels, strict=True)])
        for x in (whole, muted)
    )
    change = p - p_muted
    dropped = change >= np.percentile(change, 100 * (1 - rsc.batch_drop))
    expected = torch.from_numpy(np.where(dropped[:, None], kept, True))
    assert torch.equal(found.bool(), expected)
    assert torch.equal(left, features * expected)


def test_sagnets_logarithms():
    sagnet: Any = make_algorithm("SagNet").float()
    with half(), watched(sagnet.style) as seen:
        prepared, _ = make_prepared(sagnet)
        found = sagnet(prepared, "adversarial").total
    logits = seen[0][1].double()
    expected = sagnet.penalty * mean(cross_entropy(z, c) for z in logits for c in range(len(z)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=RTOL, atol=0)


def test_mixups_shares():
    mixup = build_algorithm("Mixup", make_network().float(), len(SIZES))
    with half(), watched(mixup.network.classifier) as seen:
        prepared = mixup.prepare(make_batches())
        found = mixup(prepared).total
    assert prepared.images.dtype == prepared.draws["shares"].dtype == torch.float32
    domains = rows(seen[0][1], prepared)
    others, shares = (iter(prepared.draws[name].tolist()) for name in ("others", "shares"))
    expected = mean(
        mean(
            share * cross_entropy(z, y) + (1 - share) * cross_entropy(z, other)
            for (z, y, _), other, share in zip(domain, others, shares, strict=False)
        )
        for domain in domains
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=RTOL, atol=0)


def test_mixstyles_shares():
    network = make_staged().float()
    mixstyle = build_algorithm("MixStyle", network, len(SIZES), p=1.0)
    with half(), watched(network.classifier):
        prepared = mixstyle.prepare(make_batches())
        assert mixstyle(prepared).total.dtype == torch.float32
    mixes: dict[int, Mix] = prepared.draws["mixes"]
    assert [mix.share.dtype for mix in mixes.values()] == [torch.float32] * 2
    # Maps stay as they are, in half precision: what is mixed is what the next layer would round.
    maps = torch.randn(sum(SIZES), 6, 4, 4).bfloat16()
    found = mix_styles(maps, mixes[1], channel_dim=1)
    expected = torch.stack(mixed_by_hand(network, mixes)(1, list(maps.double())))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.05)
