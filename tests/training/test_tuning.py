"""What fine-tuning does to layers: sizes, learning rates, frozen stages, drop path, LoRA."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import ERM, Objective
from steppe.errors import UserError
from steppe.training import load_model, make_config, merge_runs, train
from steppe.training.backbones import build_network, library_state
from steppe.training.config import Named
from steppe.training.initial import initialize
from steppe.training.lora import LowRank, merge_lora
from steppe.training.progress import Display
from steppe.training.setup import optimizer
from steppe.training.tuning import lr_factors

VIT = "test_vit"
"""timm's own vision transformer for tests: six blocks of 64 channels, images of 160 pixels."""
RUN = {
    "dataset": "Doodles",
    "targets": "sketch",
    "backbone": VIT,
    "image_size": 32,
    "weights": "none",
    "steps": 3,
    "checkpoint_every": 2,
    "batch_size": 2,
}


def build(name: str = VIT, size: int = 32, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_network(name, n_classes=3, image_size=size, **options)


def images(size: int = 32) -> Tensor:
    return torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_the_image_size_is_a_fixed_networks_own_else_the_datasets():
    def size(backbone: str, **more: Any) -> int:
        values = {key: value for key, value in RUN.items() if key != "image_size"}
        return make_config({**values, "backbone": backbone, **more}).image_size

    usual = size("small-cnn")
    assert size("vit_base_patch14_dinov2") == 518
    assert size("vit_base_patch14_dinov2", image_size=224) == 224
    assert size("convnext_atto") == usual != 518


def test_position_embeddings_are_resized_to_the_images(tmp_path):
    theirs = timm.create_model(VIT, num_classes=0)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    network = build(size=96, weights=str(tmp_path / "w.safetensors")).eval()
    theirs.set_input_size((96, 96))  # timm's way to the same
    x = images(96)
    with torch.no_grad():
        torch.testing.assert_close(network.features(x), theirs.eval()(x))
    state = library_state(VIT, network, 96)
    assert state["pos_embed"].shape == network.featurizer.pos_embed.shape


@pytest.mark.parametrize("name", [VIT, "resnet18.a1_in1k", "convnext_atto"])
def test_layer_decay_is_timms(name):
    network = build(name, size=64)
    theirs = timm.create_model(name, num_classes=3)
    scale = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(theirs, layer_decay=0.7)
        for p in group["params"]
    }
    expected = {key: scale[id(p)] for key, p in theirs.named_parameters()}
    factors = lr_factors(network, 0.7)
    for key, parameter in network.featurizer.named_parameters():
        assert factors[parameter] == pytest.approx(expected[key]), key
    assert not set(network.classifier.parameters()) & set(factors)
    assert set(expected.values()) > set(scale.values()) - {1.0}


def test_torchvisions_layers_are_timms():
    found = [lr_factors(build(name, size=64), 0.7) for name in ("resnet18", "resnet18.a1_in1k")]
    assert list(found[0].values()) == pytest.approx(list(found[1].values()))


@pytest.mark.parametrize("name", ["sgd", "fad", "sam-on", "gam"])
def test_optimizers_train_every_layer_at_its_own_rate(name):
    algorithm = ERM(build(), n_domains=1)
    chosen = Named(name=name, lr=0.1)
    factors = lr_factors(algorithm.network, 0.5)
    (objective,) = algorithm.objectives()
    made = optimizer(chosen, objective, algorithm, lr_factors=factors)
    rates = {p: group["lr"] for group in made.param_groups for p in group["params"]}
    assert rates.keys() == set(algorithm.parameters())
    for parameter in algorithm.parameters():
        assert rates[parameter] == pytest.approx(0.1 * factors.get(parameter, 1.0))
    state = copy.deepcopy(made.state_dict())
    other = optimizer(chosen, objective, algorithm, lr_factors=factors)
    other.load_state_dict(state)
    assert other.state_dict()["param_groups"] == state["param_groups"]


@pytest.mark.parametrize(
    ("name", "what", "frozen"),
    [
        ("resnet18", "1", ("conv1", "bn1")),
        ("resnet18", "2", ("conv1", "bn1", "layer1")),
        ("resnet18", "layer1, layer3.0", ("layer1", "layer3.0")),
        ("mnist-cnn", "2", ("0", "2", "3", "5")),
        (VIT, "2", ("cls_token", "pos_embed", "patch_embed", "blocks.0")),
        (VIT, "pos_embed", ("pos_embed",)),
        (VIT, "all", ("",)),
        ("small-cnn", "1", ("0", "1")),
        (VIT, "none", ()),
    ],
)
def test_frozen_layers(name, what, frozen):
    network = build(name, freeze=what)
    for key, parameter in network.featurizer.named_parameters():
        inside = any(key == part or key.startswith(f"{part}.") or not part for part in frozen)
        assert parameter.requires_grad != inside, key
    assert network.classifier.weight.requires_grad


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"freeze": "20"}, ["freeze=20", "1 (the stem) to 7"]),
        ({"freeze": "0"}, ["freeze=0", "none freezes nothing"]),
        ({"freeze": "blocks.9"}, ["no part 'blocks.9'", "patch_embed, blocks, norm"]),
        ({"name": "resnet18", "lora": 2}, ["lora=2", "'resnet18' has no linear layers"]),
        ({"lora": 64}, ["lora=64", "ranks below 64"]),
        ({"name": "small-cnn", "drop_path": 0.1}, ["drop_path=0.1", "'small-cnn'"]),
        ({"name": "vgg11", "drop_path": 0.1}, ["drop_path=0.1", "'vgg11' does not have it"]),
        ({"embedding": 77}, ["embedding=77", "gives 64 features"]),
    ],
)
def test_what_a_backbone_cannot_do_says_why(options, words):
    with pytest.raises(UserError) as caught:
        build(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_frozen_batch_norm_keeps_its_statistics():
    network = build("resnet18", freeze_bn=False, freeze="2").train()
    assert not network.featurizer.bn1.training
    assert not network.featurizer.layer1[0].bn1.training
    assert network.featurizer.layer2[0].bn1.training


def test_drop_path_skips_branches_in_training_only():
    plain, dropped = build().eval(), build(drop_path=0.9)
    dropped.load_state_dict(plain.state_dict())
    x = images()
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(dropped.eval()(x), plain(x))
        assert not torch.equal(dropped.train()(x), plain(x))


@pytest.fixture
def lora() -> Any:
    """A network whose updates are not zero."""
    network = build(lora=2)
    for part in network.modules():
        if isinstance(part, LowRank):
            nn.init.normal_(part.B, std=0.1)
    return network.eval()


def test_lora_starts_as_the_backbone_and_trains_its_updates_alone():
    plain, network = build().eval(), build(lora=2).eval()
    x = images()
    network.classifier.load_state_dict(plain.classifier.state_dict())
    assert torch.equal(network(x), plain(x))
    trained = {key for key, p in network.featurizer.named_parameters() if p.requires_grad}
    assert {key.rpartition(".")[2] for key in trained} == {"A", "B"}
    assert len(trained) == 2 * 4 * 6  # qkv, proj, fc1 and fc2 of six blocks


def test_lora_adds_b_times_a(lora):
    linear = lora.featurizer.blocks[1].mlp.fc1
    (update,) = linear.parametrizations.weight
    x = torch.randn(5, linear.in_features, dtype=torch.float64)
    linear.double()
    weight = linear.parametrizations.weight.original
    expected = F.linear(x, weight, linear.bias) + x @ update.A.T @ update.B.T
    torch.testing.assert_close(linear(x), expected)


def test_merged_equals_unmerged_and_is_timms_network_again(lora):
    x = images()
    with torch.no_grad():
        before = lora(x)
        merge_lora(lora)
        assert torch.equal(lora(x), before)
    theirs = timm.create_model(VIT, num_classes=3, img_size=32).eval()
    theirs.load_state_dict(library_state(VIT, lora, 32))
    torch.testing.assert_close(theirs(x), before)


def test_a_run_may_start_from_a_run_with_lora(folder, tmp_path):
    values = {**RUN, "dataset": str(folder), "targets": "a", "augment": False, "workers": 0}
    train(make_config({**values, "lora": 2, "optimizer": {"name": "sgd", "lr": 0.1}}), tmp_path)
    first = load_model(tmp_path).algorithm.network
    config = make_config({**values, "weights": str(tmp_path)})
    second = initialize(config, ("cat", "dog"), 3, 2).network.eval()
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(second(x), first(x))
    with pytest.raises(UserError, match="not the product of their means"):
        merge_runs([tmp_path], tmp_path / "merged", how="wise")


def test_nothing_to_train_is_an_error():
    algorithm = ERM(build(), n_domains=1).requires_grad_(False)
    objective = Objective("main", tuple(algorithm.parameters()))
    with pytest.raises(UserError, match="'main' has nothing to train"):
        optimizer(Named(name="sgd", lr=0.1), objective, algorithm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three domains of two classes with four images each."""
    root: Path = tmp_path_factory.mktemp("data") / "Noise"
    drawn = np.random.default_rng(0)
    for domain, name, number in itertools.product("abc", ("cat", "dog"), range(4)):
        path = root / domain / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return root


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"lora": 2, "lr_decay": 0.5, "drop_path": 0.3}, {"classifier", "A", "B"}),
        ({"freeze": 3, "lr_decay": 0.5}, {"2", "3", "4", "5", "norm", "classifier"}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path, options, changed):
    class Stop(Exception):
        pass

    class Once(Display):
        def step(self, done: int) -> None:
            if done == 2:  # the last checkpoint is that of the first update
                raise Stop

    values = {**RUN, "dataset": str(folder), "targets": "a", "augment": False, **options}
    config = make_config({**values, "optimizer": "fad", "workers": 0})
    train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "broken", display=Once())
    train(config, tmp_path / "broken", resume=True)
    whole, broken, first = (
        load_model(tmp_path / run, which).state_dict()
        for run, which in (("whole", "last"), ("broken", "last"), ("whole", "step:0"))
    )
    for key, value in whole.items():
        assert torch.equal(value, broken[key]), key
        if not torch.equal(value, first[key]):
            assert changed & set(key.split(".")), key
    assert not all(torch.equal(value, first[key]) for key, value in whole.items())
