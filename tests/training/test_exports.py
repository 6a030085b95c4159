"""A run's network in other programs' hands: every format is loaded again, and predicts the same."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm")

import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision import models, transforms as T

from steppe.errors import UserError
from steppe.training import export_run, load_model, train
from steppe.training.backbones import build_network
from steppe.training.exports import EXTRA_FILE, FORMATS

from .test_models import CLASSES, config, paint_domain


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("somebody") / "own images"
    for seed, domain in enumerate(("ink", "oil", "pen")):
        paint_domain(root / domain, seed)
    return root


@pytest.fixture(scope="module")
def run(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(config(own, steps=7), path)
    return path


def batch(n: int, channels: int = 3, size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    shape = (n, channels, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def pt2(path: Path, pixels: Tensor) -> tuple[Tensor, dict[str, str]]:
    extra = {EXTRA_FILE: ""}
    model = torch.export.load(path, extra_files=extra).module()
    with torch.no_grad():
        return model(pixels), json.loads(extra[EXTRA_FILE])


def onnx(path: Path, pixels: Tensor) -> tuple[Tensor, dict[str, str]]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    assert [one.shape[0] for one in (*session.get_inputs(), *session.get_outputs())] == [
        "batch",
        "batch",
    ]
    (found,) = session.run(["logits"], {"pixels": pixels.numpy()})
    return torch.from_numpy(found), session.get_modelmeta().custom_metadata_map


@pytest.mark.parametrize("load", [pt2, onnx])
@pytest.mark.parametrize("backbone", ["small-cnn", "mobilenetv3_small_050"])
def test_a_graph_predicts_as_the_model_does(own, tmp_path, backbone, load):
    if load is onnx:
        pytest.importorskip("onnxscript")
    train(config(own, backbone=backbone, image_size=32, steps=2), tmp_path / "run")
    out = tmp_path / f"model.{load.__name__}"
    facts = export_run(tmp_path / "run", out)
    model = load_model(tmp_path / "run")
    for n in (1, 2, 5):  # the number of images is left open
        pixels = batch(n, size=32)
        logits, metadata = load(out, pixels)
        with torch.no_grad():
            expected = model(pixels)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits.softmax(1), expected.softmax(1), rtol=0, atol=1e-5)
    assert metadata == facts
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["trained_on"]) == ["ink", "oil"]
    assert (facts["image_size"], facts["step"], facts["which"]) == ("32", str(model.step), "best")
    assert json.loads(facts["config"])["dataset"] == "own images"
    assert "normalized inside" in facts["input"]
    # Nothing of this machine.
    for secret in (
        str(own.parent),
        str(Path(timm.__file__).parent),
        str(Path(__file__).parents[2]),
    ):
        assert secret.encode() not in out.read_bytes()


@pytest.mark.parametrize("load", [pt2, onnx])
def test_a_graph_for_grey_images(tmp_path, load):
    if load is onnx:
        pytest.importorskip("onnxscript")
    train(config("RotatedDigits", targets="75", image_size=8, steps=1), tmp_path / "run")
    out = tmp_path / f"model.{load.__name__}"
    export_run(tmp_path / "run", out)
    pixels = batch(3, 1, 8)
    logits, _ = load(out, pixels)
    with torch.no_grad():
        torch.testing.assert_close(logits, load_model(tmp_path / "run")(pixels))


@pytest.mark.parametrize("algorithm", ["DMG", "DSON"])
def test_a_graph_holds_what_an_algorithm_adds_to_its_network(tmp_path, algorithm):
    digits = config("RotatedDigits", targets="75", image_size=8, steps=1, algorithm=algorithm)
    train(digits, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "model.pt2")
    for n in (1, 5):
        pixels = batch(n, 1, 8)
        logits, _ = pt2(tmp_path / "model.pt2", pixels)
        with torch.no_grad():
            torch.testing.assert_close(logits, load_model(tmp_path / "run")(pixels))
    with pytest.raises(UserError, match=rf"{algorithm} needs more .* as \.pt2 or \.onnx"):
        export_run(tmp_path / "run", tmp_path / "weights.safetensors")


@pytest.mark.parametrize("name", ["model", "model.pt", "model.onnx.gz"])
def test_an_ending_without_a_format_is_refused(run, tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: .* one of {', '.join(FORMATS)}"):
        export_run(run, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_onnx_without_its_extra_names_the_package(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match="onnxscript"):
        export_run(run, tmp_path / "model.onnx")


def test_a_network_that_cannot_be_traced_is_one_line(run, tmp_path, monkeypatch):
    network = type(load_model(run).algorithm.network)

    def forward(self: torch.nn.Module, images: Tensor) -> Tensor:
        assert images.float().mean() >= 0  # depends on the pixels
        return (
            images.float().mean((2, 3)) if images.float().sum() > 0 else images.float().sum((2, 3))
        )

    monkeypatch.setattr(network, "forward", forward)
    with pytest.raises(UserError, match=r"small-cnn' cannot be exported as a graph.*\.safetensors"):
        export_run(run, tmp_path / "model.pt2")


@pytest.mark.parametrize(
    ("backbone", "make"),
    [("resnet18", models.resnet18), ("mobilenetv3_small_050", None), ("small-cnn", None)],
)
def test_an_export_is_the_librarys_model(own, tmp_path, backbone, make):
    weights = tmp_path / "secret" / "begin.safetensors"
    weights.parent.mkdir()
    begin = build_network(backbone, n_classes=2, image_size=32)
    save_file(begin.featurizer.state_dict(), weights)
    changes = {"backbone": backbone, "image_size": 32, "weights": str(weights), "steps": 2}
    train(config(own, **changes, root=str(tmp_path / "secret")), tmp_path / "run")
    out = tmp_path / "out.safetensors"
    facts = export_run(tmp_path / "run", out)

    with safe_open(out, "pt") as file:
        assert file.metadata() == facts
    assert facts["backbone"] == backbone
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert b"secret" not in out.read_bytes()
    assert str(own.parent).encode() not in out.read_bytes()
    assert json.loads(facts["config"])["dataset"] == "own images"

    model = load_model(tmp_path / "run")
    with Image.open(own / "pen" / "ant" / "0.png") as image:
        size = int(facts["image_size"])
        mean, std = json.loads(facts["mean"]), json.loads(facts["std"])
        transform = T.Compose([T.Resize((size, size)), T.ToTensor(), T.Normalize(mean, std)])
        x, expected = transform(image)[None], model(model.preprocess(image))
    if backbone != "small-cnn":
        theirs = make(num_classes=3) if make else timm.create_model(backbone, num_classes=3)
        theirs.load_state_dict(load_file(out), strict=True)
        torch.testing.assert_close(theirs.eval()(x), expected)
    # And as the beginning of another run.
    network = build_network(backbone, n_classes=9, image_size=32, weights=str(out)).eval()
    assert torch.equal(network.features(x), model.algorithm.network.features(x))


def test_an_export_that_cannot_be_written_names_the_file(run, tmp_path):
    with pytest.raises(UserError, match=r"nowhere/model\.safetensors: there is no"):
        export_run(run, tmp_path / "nowhere" / "model.safetensors")
