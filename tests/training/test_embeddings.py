"""Text embeddings as the classifier: zero-shot logits, files that do not fit, and CLIPood."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import ERM, build_algorithm
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training import (
    evaluate_run,
    export_run,
    load_model,
    make_config,
    merge_runs,
    train,
)
from steppe.training.backbones import build_network
from steppe.training.embeddings import load_classifier, set_classifier

CLIP = "vit_xsmall_patch16_clip_224.tinyclip_yfcc15m"
SIZE = 32
CLASSES = ("cat", "dog", "giraffe")


def texts(n: int = 3, width: int = 512) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(4)) * 3


def named(width: int = 512) -> dict[str, Tensor]:
    """In another order than the classes, and with one more."""
    names = ("giraffe", "zebra", "cat", "dog")
    return {name: vector.clone() for name, vector in zip(names, texts(4, width), strict=True)}


def clip(**options: Any) -> Any:
    torch.manual_seed(0)
    return build_network(CLIP, n_classes=3, image_size=SIZE, embedding=512, **options).eval()


def test_logits_are_a_hundred_cosines_of_timms_projection(tmp_path):
    save_file(named(), tmp_path / "t.safetensors")
    network = clip()
    load_classifier(network, tmp_path / "t.safetensors", CLASSES)
    theirs = timm.create_model(CLIP, img_size=SIZE).eval().double()
    theirs.load_state_dict(network.featurizer.state_dict())
    network.double()
    set_classifier(network, torch.stack([named()[name] for name in CLASSES]).double())
    x = torch.rand(4, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        features, found = theirs(x), network(x)
    for i, c in itertools.product(range(4), range(3)):
        expected = 100 * F.cosine_similarity(features[i], named()[CLASSES[c]].double(), dim=0)
        assert abs(found[i, c] - expected) < 1e-6
    assert theirs.head.bias.abs().max() == 0


@pytest.mark.parametrize(
    "name",
    ["vit_base_patch16_siglip_224", "test_vit"],
    ids=["SigLIP, whose features are the joint space", "any backbone of that width"],
)
def test_a_tower_without_a_projection_is_used_as_it_is(name):
    width = 768 if "siglip" in name else 64
    network = build_network(name, n_classes=3, image_size=SIZE, embedding=width)
    features = network.eval().features(torch.rand(2, 3, SIZE, SIZE))
    assert features.shape == (2, width)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("kind", ["safetensors", "pt", "npy", "matrix.pt"])
def test_every_kind_of_file_gives_the_same_classifier(tmp_path, kind):
    path, matrix = tmp_path / f"t.{kind}", torch.stack([named()[name] for name in CLASSES])
    if kind == "npy":
        np.save(path, matrix.numpy())
    elif kind == "safetensors":
        save_file(named(), path)
    else:
        torch.save(named() if kind == "pt" else matrix, path)
    network = clip()
    load_classifier(network, path, CLASSES)
    expected = 100 * matrix / matrix.norm(dim=1, keepdim=True)
    torch.testing.assert_close(network.classifier.weight.detach(), expected)
    assert network.classifier.bias.abs().max() == 0


def saved(path: Path, content: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, content)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.pt", {"cat": torch.ones(512), "dogs": torch.ones(512)}, ["'dog' (it has 'dogs')"]),
        ("t.pt", {"cat": torch.ones(512), "dog": torch.ones(3)}, ["different lengths: [3, 512]"]),
        ("t.pt", torch.ones(5, 512), ["5 rows, but there are 3 classes", "cat, dog, giraffe"]),
        ("t.pt", torch.ones(3, 8), ["8 dimensions", "512 features"]),
        ("t.pt", torch.zeros(3, 512), ["'cat' has norm 0"]),
        ("t.pt", {"state_dict": {}}, ["neither a vector per class name nor a matrix"]),
        ("t.npy", np.ones(3), ["neither a vector per class name nor a matrix"]),
        ("t.npy", np.array([{}], dtype=object), ["cannot be read", "allow_pickle"]),
    ],
)
def test_a_file_that_does_not_fit_says_why(tmp_path, name, content, words):
    path = saved(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        load_classifier(clip(), path, CLASSES)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two domains of three classes with four images each."""
    root: Path = tmp_path_factory.mktemp("data") / "Noise"
    drawn = np.random.default_rng(0)
    for domain, name, number in itertools.product("ab", CLASSES, range(4)):
        path = root / domain / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = drawn.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return root


def config(folder: Path, file: Path, **more: Any) -> Any:
    values = {
        "dataset": str(folder),
        "targets": "a",
        "backbone": "test_vit",
        "image_size": SIZE,
        "weights": "none",
        "class_embeddings": str(file),
        "steps": 1,
        "batch_size": 2,
        "augment": False,
        "workers": 0,
    }
    return make_config({**values, **more})


def test_a_run_without_a_learning_rate_is_zero_shot(folder, tmp_path):
    file = tmp_path / "t.safetensors"
    save_file(named(64), file)
    made = config(folder, file, optimizer={"name": "sgd", "lr": 0.0})
    assert made.embedding == 64
    train(made, tmp_path / "run")
    file.unlink()  # the run has its own copy
    model = load_model(tmp_path / "run")
    torch.manual_seed(0)
    network = build_network("test_vit", n_classes=3, image_size=SIZE, embedding=64)
    start = torch.stack([named(64)[name] for name in CLASSES])
    set_classifier(network, start)
    for key, value in network.state_dict().items():
        assert torch.equal(model.algorithm.network.state_dict()[key], value), key
    (scores,) = evaluate_run(tmp_path / "run").values()
    images = [Image.open(path) for path in sorted(folder.glob("a/*/*.png"))]
    with torch.no_grad():
        cosines = F.cosine_similarity(
            model.algorithm.network.features(model.preprocess(images))[:, None], start[None], dim=2
        )
    right = (cosines.argmax(1) == torch.arange(3).repeat_interleave(4)).float().mean()
    assert scores.accuracy == pytest.approx(right)
    with pytest.raises(UserError, match=r"divides features by their norm.*\.pt2"):
        export_run(tmp_path / "run", tmp_path / "w.safetensors")


def test_wise_ft_interpolates_from_the_zero_shot_network(folder, tmp_path):
    file = tmp_path / "t.safetensors"
    save_file(named(64), file)
    train(config(folder, file, optimizer={"name": "sgd", "lr": 0.1}), tmp_path / "run")
    merge_runs([tmp_path / "run"], tmp_path / "wise", how="wise", alpha=0.0)
    found = load_model(tmp_path / "wise").algorithm.network.classifier.weight
    expected = 100 * F.normalize(torch.stack([named(64)[name] for name in CLASSES]))
    torch.testing.assert_close(found, expected)


def test_clipood_trains_the_tower_under_fixed_texts(folder, tmp_path):
    file = tmp_path / "t.safetensors"
    save_file(named(64), file)
    made = config(
        folder, file, algorithm="CLIPood", averaging="bma", steps=3, checkpoint_every=2, lora=2
    )
    records = train(made, tmp_path / "run")
    assert all(record["averaged"] for record in records)
    classifier = load_model(tmp_path / "run", "last").algorithm.network.classifier
    expected = 100 * F.normalize(torch.stack([named(64)[name] for name in CLASSES]))
    torch.testing.assert_close(classifier.weight, expected)
    metadata = export_run(tmp_path / "run", tmp_path / "w.pt2")
    assert json.loads(metadata["config"])["class_embeddings"] == file.name


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"linear_steps": 1}, r"linear_steps=1 .* 'CLIPood' keeps .* linear_steps=0"),
        ({"linear_probe": True}, r"linear_probe=True .* linear_probe=false"),
        ({"recipe": "erm++", "steps": 700}, r"linear_steps=500 .* if a recipe"),
    ],
)
def test_nothing_else_trains_the_classifier_of_clipood(folder, tmp_path, option, remedy):
    file = tmp_path / "t.safetensors"
    save_file(named(64), file)
    with pytest.raises(UserError, match=remedy):
        config(folder, file, algorithm="CLIPood", **{"steps": 2, **option})


def margin_loss(network: Any, x: Tensor, labels: Tensor, margin: float) -> Tensor:
    """The authors' logits, written out: s <f - margin t_y, t_c>."""
    t = F.normalize(network.classifier.weight)
    losses = []
    for f, y in zip(network.features(x), labels, strict=True):
        logits = torch.stack([100 * (f - margin * t[y]) @ t[c] for c in range(len(t))])
        losses.append(torch.logsumexp(logits, 0) - logits[y])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_clipoods_loss_is_the_cross_entropy_of_logits_with_a_margin(margin):
    torch.manual_seed(0)
    network = build_network("test_vit", n_classes=3, image_size=SIZE, embedding=64)
    set_classifier(network, texts(3, 64))
    algorithm = build_algorithm("CLIPood", network, 1, margin=margin).double()
    batch = [Batch(torch.rand(6, 3, SIZE, SIZE, dtype=torch.float64), torch.arange(6) % 3)]
    prepared = algorithm.prepare(batch)
    loss = algorithm(prepared).total
    expected = margin_loss(network, prepared.images, prepared.labels, margin)
    torch.testing.assert_close(loss, expected)
    plain = ERM(network, 1)(prepared).total
    assert torch.allclose(loss, plain) == (margin == 0)
    assert all(p is not network.classifier.weight for p in algorithm.objectives()[0].parameters)
