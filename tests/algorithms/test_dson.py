"""DSON: its layer against torch's batch and instance norms, and whose statistics it uses."""

import copy
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from steppe.algorithms import build_algorithm
from steppe.averaging import reestimate
from steppe.errors import UserError
from steppe.training.backbones import build_network
from tests.algorithms.oracles import (
    N_CLASSES,
    SIZES,
    make_batches,
    make_network,
    move,
)


def make(n_domains: int = len(SIZES), freeze_bn: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4, freeze_bn=freeze_bn)
    for norm in (network.featurizer[1], network.featurizer[4]):  # as if pretrained
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return build_algorithm("DSON", network, n_domains, **options).double()


def shares(dson: Any, logit: float) -> None:
    for norm in dson.norms.values():
        nn.init.constant_(norm.mix, logit)


def test_the_batchs_share_of_one_domain_is_batch_norm() -> None:
    dson = make(n_domains=1)
    shares(dson, 40.0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4, freeze_bn=False)
    erm = build_algorithm("ERM", network.double(), 1)
    state = {k: v for k, v in dson.network.state_dict().items() if not k.endswith("mix")}
    own = network.state_dict()
    network.load_state_dict({k: v.view_as(own[k]) for k, v in state.items()})
    for seed in range(2):
        prepared = dson.prepare(make_batches((8,), seed=seed))
        found, expected = dson(prepared), erm(prepared)
        torch.testing.assert_close(found.total, expected.total)
        dson.commit(prepared, {"main": found})
    for name, value in network.state_dict().items():
        torch.testing.assert_close(dson.network.state_dict()[name].view_as(value), value)
    images = make_batches((8,), seed=9)[0].images
    torch.testing.assert_close(dson.eval().predict(images), erm.eval().predict(images))


def test_the_images_share_is_instance_norm() -> None:
    dson = make()
    shares(dson, -40.0)
    prepared = dson.prepare(make_batches())
    expected = copy.deepcopy(dson.network.featurizer)
    for name, norm in list(expected.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            instance = nn.InstanceNorm2d(norm.num_features, norm.eps, affine=True).double()
            instance.load_state_dict({"weight": norm.weight[0], "bias": norm.bias[0]})
            expected.set_submodule(name, instance)
    logits = dson.network.classifier(expected(prepared.images))
    torch.testing.assert_close(dson(prepared).logits, logits)


def test_a_domains_statistics_are_its_own() -> None:
    """Each domain, with its own weights, as if it were the only one."""
    dson = make()
    move(dson, 1)
    prepared = dson.prepare(make_batches())
    found = prepared.split(dson(prepared).logits)
    for domain, batch in enumerate(make_batches()):
        single = branch(dson, domain)
        torch.testing.assert_close(single(single.prepare([batch])).logits, found[domain])


def branch(dson: Any, domain: int) -> Any:
    single = make(n_domains=1)
    own = single.state_dict()
    state = {}
    for name, value in dson.state_dict().items():
        rows = value.shape != own[name].shape
        state[name] = value[domain : domain + 1] if rows else value
    single.load_state_dict(state)
    return single


def test_predictions_are_those_of_the_branches() -> None:
    dson = make()
    move(dson, 1)
    prepared = dson.prepare(make_batches())
    dson.commit(prepared, {"main": dson(prepared)})
    images = make_batches(seed=5)[0].images
    singles = [branch(dson, domain).eval().predict(images) for domain in range(3)]
    dson.eval()
    torch.testing.assert_close(dson.predict(images), torch.stack(singles).mean(0))
    for domain, single in enumerate(singles):
        torch.testing.assert_close(dson.predict_source(images, domain), single)
    assert not torch.allclose(singles[0], singles[1], rtol=1e-2)
    torch.testing.assert_close(dson.predict(images)[2:3], dson.predict(images[2:3]))


def statistics(dson: Any) -> list[Tensor]:
    return [b.clone() for norm in dson.norms.values() for b in norm.buffers()]


def test_only_commit_changes_running_statistics() -> None:
    dson = make()
    before = statistics(dson)
    prepared = dson.prepare(make_batches())
    first = dson(prepared)
    move(dson, 1)
    dson(prepared)
    dson.risk(prepared, 1)
    assert all(map(torch.equal, statistics(dson), before))
    dson.commit(prepared, {"main": first})
    after = statistics(dson)
    assert not any(map(torch.equal, after, before))
    counts = [norm.num_batches_tracked.item() for norm in dson.norms.values()]
    assert counts == [1, 1]


def test_statistics_are_live_even_if_batch_norm_is_frozen() -> None:
    prepared = make().prepare(make_batches())
    frozen, live = make(freeze_bn=True), make()
    assert torch.equal(frozen(prepared).total, live(prepared).total)
    assert frozen(prepared).state.keys() == live(prepared).state.keys() != set()
    frozen.eval()
    assert not any(norm.training for norm in frozen.norms.values())


def test_averaged_weights_get_new_statistics() -> None:
    """The mean over batches of each domain's, as for batch norm."""
    dson = make()
    parts = [torch.cat([b.images for b in make_batches((4, 4, 4), seed=s)]) for s in range(3)]
    maps = [
        dson.network.featurizer[0](dson.network.normalize(x)).unflatten(0, (3, 4)) for x in parts
    ]
    reestimate(dson, dson.predict, parts)
    norm = dson.network.featurizer[1]
    means, variances = zip(*((m.mean((1, 3, 4)), m.var((1, 3, 4))) for m in maps), strict=True)
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0))
    assert norm.momentum == 0.1
    with pytest.raises(UserError, match="got 5 images: call eval"):
        dson.predict(parts[0][:5])


def test_the_shares_have_their_own_learning_rate() -> None:
    dson = make(lr_factor=10.0)
    (objective,) = dson.objectives()
    names = {name for name, p in dson.named_parameters() if p in objective.lr_factors}
    assert names == {"network.featurizer.1.mix", "network.featurizer.4.mix"}
    assert set(objective.lr_factors.values()) == {10.0}


def test_timms_norm_with_an_activation() -> None:
    """It equals a batch norm that the activation follows."""
    plain = make()
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4, freeze_bn=False)
    for at in (1, 4):
        joined = BatchNormAct2d(network.featurizer[at].num_features, act_layer=nn.ReLU)
        own = plain.network.featurizer[at]
        joined.load_state_dict(
            {k: v[0] if v.dim() > 1 else v for k, v in own.state_dict().items() if k != "mix"}
        )
        network.featurizer[at], network.featurizer[at + 1] = joined, nn.Identity()
    dson = build_algorithm("DSON", network, len(SIZES)).double()
    dson.load_state_dict(plain.state_dict())
    prepared = dson.prepare(make_batches())
    found, expected = dson(prepared), plain(prepared)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    assert found.logits.std() > 0.01
    images = make_batches()[0].images
    assert torch.equal(dson.eval().predict(images), plain.eval().predict(images))


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match="this backbone has no batch norm: choose a ResNet"):
        build_algorithm("DSON", make_network(), len(SIZES))
    mixed = make_network()
    mixed.featurizer.extend([nn.BatchNorm1d(6), nn.BatchNorm2d(6)])
    with pytest.raises(UserError, match="has BatchNorm1d and BatchNorm2d: choose a ResNet"):
        build_algorithm("DSON", mixed, len(SIZES))
    with pytest.raises(UserError, match="normalizes by domain: call predict"):
        make().network(make_batches()[0].images)
