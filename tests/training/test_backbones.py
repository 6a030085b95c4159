"""Backbones: the right module, the right weights from any honest file, and nothing unpickled."""

import functools
import hashlib
import http.server
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")

import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import functional as TF

from steppe.algorithms import ERM
from steppe.domains import load
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training.backbones import build_network, library_state

REPOSITORY = Path(__file__).parents[2]
LITE0 = "tf_efficientnet_lite0"
WEIGHTS = Path(os.environ.get("STEPPE_WEIGHTS", REPOSITORY.parent / "shared" / "weights"))
PACS = Path(os.environ.get("STEPPE_PACS", REPOSITORY / "data" / "PACS"))

State = dict[str, Tensor]


def build(name: str, image_size: int = 32, **options: Any) -> Any:
    return build_network(name, n_classes=5, image_size=image_size, **options)


def images(n: int = 4, size: int = 32, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (n, channels, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("name", "n_features", "channels"),
    [
        ("resnet18", 512, 3),
        ("resnet50", 2048, 3),
        ("resnet50-v1", 2048, 3),
        ("mobilenetv3_small_050", 1024, 3),
        ("mobilenetv3_small_050", 1024, 2),
        ("resnet10t", 512, 1),
        ("small-cnn", 512, 3),
        ("small-cnn", 512, 1),
        ("mnist-cnn", 128, 2),
    ],
)
def test_backbones_give_features_and_logits(name, n_features, channels):
    network = build(name, channels=channels).eval()
    x = images(channels=channels)
    assert network.n_features == n_features
    assert network.features(x).shape == (4, n_features)
    assert network(x).shape == (4, 5)
    torch.testing.assert_close(network(x), network.classifier(network.features(x)))


def test_resnets_are_torchvisions_and_others_timms():
    """DomainBed's tables are with torchvision's; timm has networks of these names too."""
    assert type(build("resnet18").featurizer) is models.ResNet
    assert type(build("resnet18.a1_in1k").featurizer) is timm.models.ResNet


def test_normalization_is_what_the_backbone_was_trained_with():
    for name, mean, std in (
        ("resnet18", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("vit_tiny_patch16_224", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ):
        network = build(name, image_size=224)
        assert network.mean.flatten().tolist() == pytest.approx(mean)
        assert network.std.flatten().tolist() == pytest.approx(std)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnt18"}, ["'resnt18'", "did you mean 'resnet18'?", "every timm model"]),
        ({"name": "resnet_50"}, ["did you mean 'resnet50'?"]),
        ({"name": "resnet50-v1", "weights": "imagenet"}, ["no ImageNet weights", "--weights FILE"]),
        ({"name": "mobilenetv3_smal_100"}, ["did you mean 'mobilenetv3_small_100'?"]),
        ({"name": "resnet18.nobody"}, ["'resnet18.nobody'", "nobody"]),
        ({"name": "resnet18", "channels": 1}, ["'resnet18'", "3 channels, got 1"]),
        ({"name": "small-cnn", "weights": "imagenet"}, ["no ImageNet weights", "weights=none"]),
        # What timm knows of no weights for.
        ({"name": "resnet10t.none", "weights": "imagenet"}, ["'resnet10t.none'", "--weights FILE"]),
        # Patches must cover the image, said before any image is read.
        ({"name": "vit_tiny_patch16_224", "image_size": 65}, ["image_size=65", "of 16", "224"]),
        # timm's own choice of weights is a classifier of ImageNet.
        (
            {"name": "vit_base_patch32_clip_224", "embedding": 512},
            ["1000 outputs", "such as 'vit_base_patch32_clip_224."],
        ),
        # Texts of a larger tower, which are as long as this one is wide.
        ({"name": "vit_base_patch32_clip_224.openai", "embedding": 768}, ["head has 512 outputs"]),
        # timm itself cannot take the classifier off this one.
        pytest.param(
            {"name": "inception_next_atto"},
            ["'inception_next_atto'", "no features"],
            marks=pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
        ),
    ],
)
def test_what_cannot_be_built_says_why(options, words):
    with pytest.raises(UserError) as caught:
        build(**options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_resnet50_v1_has_its_stride_in_the_1x1_convolutions():
    """Which pixels a stage looks at tells the two apart; the parameters are the same."""
    network = build("resnet50-v1", image_size=64)
    bottleneck = network.featurizer.layer2[0].eval()
    x = torch.zeros(1, 256, 8, 8)
    x[..., 1::2, 1::2] = 1.0  # all that a 1x1 convolution with stride 2 passes over
    with torch.no_grad():
        assert torch.equal(bottleneck(x), bottleneck(torch.zeros_like(x)))
        plain = build("resnet50").featurizer.layer2[0].eval()
        assert not torch.equal(plain(x), plain(torch.zeros_like(x)))
    state = library_state("resnet50-v1", network, 64)
    assert state.keys() == models.resnet50().state_dict().keys()


@functools.cache
def resnet18_state() -> State:
    """A whole ResNet-18 with statistics of its own, classifier included."""
    torch.manual_seed(7)
    model = models.resnet18()
    model(torch.randn(4, 3, 32, 32))
    return model.state_dict()


def prefixed(prefix: str) -> State:
    return {f"{prefix}{key}": value for key, value in resnet18_state().items()}


FILES: dict[str, tuple[str, Callable[[], Any]]] = {
    "safetensors": ("w.safetensors", resnet18_state),
    "pt": ("w.pt", resnet18_state),
    "state_dict": ("w.pth", lambda: {"epoch": 3, "state_dict": resnet18_state()}),
    "model": ("w.pth", lambda: {"model": resnet18_state(), "optimizer": {"state": {0: 1.0}}}),
    "module": ("w.pth", lambda: {"state_dict": prefixed("module.")}),
    "compiled": ("w.pth", lambda: prefixed("module._orig_mod.")),
    "old": (  # before counters, and without a classifier
        "w.pt",
        lambda: {
            key: value
            for key, value in resnet18_state().items()
            if not key.startswith("fc.") and not key.endswith("num_batches_tracked")
        },
    ),
    "half": ("w.safetensors", lambda: {k: v.half() for k, v in resnet18_state().items()}),
}


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_weights_from_a_file(tmp_path, kind):
    name, content = FILES[kind]
    path = write(tmp_path / name, content())
    network = build("resnet18", weights=str(path)).eval()
    expected = models.resnet18()
    state = resnet18_state()
    if kind == "half":
        state = {k: v.half().to(v.dtype) for k, v in state.items()}
    expected.load_state_dict(state)
    expected.fc = nn.Identity()
    x = images()
    assert torch.equal(network.features(x), expected.eval()(network.normalize(x)))
    assert network.classifier.out_features == 5


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("format", ["torch", "legacy", "pickle"])
def test_a_pickled_program_is_not_run(tmp_path, format):
    marker, path = tmp_path / "exploded", tmp_path / "w.pth"
    content = {"state_dict": {"conv1.weight": torch.zeros(1)}, "by the way": Bomb(marker)}
    if format == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=format == "torch")
    with pytest.raises(UserError, match=r"w\.pth contain more than tensors.*use safetensors"):
        build("resnet18", weights=str(path))
    assert not marker.exists()


def damaged(path: Path) -> None:
    save_file({"w": torch.zeros(3)}, path)
    path.write_bytes(path.read_bytes()[:-4])


def cut(path: Path) -> None:
    torch.save(torch.zeros(100), path)
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("name", "prepare", "words"),
    [
        ("gone.pt", lambda path: None, "not a file"),
        ("folder.pt", lambda path: path.mkdir(), "not a file"),
        ("empty.pt", lambda path: path.touch(), "cannot be read"),
        ("empty.safetensors", lambda path: path.touch(), "cannot be read"),
        ("cut.pt", cut, "cannot be read"),
        ("cut.safetensors", damaged, "cannot be read"),
        ("text.pt", lambda path: path.write_text("hello"), "are damaged"),
        ("module.pt", lambda path: torch.save(nn.Linear(2, 2), path), "contain more than tensors"),
        ("tensor.pt", lambda path: torch.save(torch.zeros(2), path), "are not a state dict"),
        ("numbers.pt", lambda path: torch.save({0: torch.zeros(2)}, path), "are not a state dict"),
        ("log.pt", lambda path: torch.save({"loss": 1.0}, path), "are not a state dict"),
        ("nothing.pt", lambda path: torch.save({}, path), "tensors are missing"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, prepare, words):
    prepare(tmp_path / name)
    with pytest.raises(UserError, match=words) as caught:
        build("small-cnn", weights=str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("resnet50", resnet18_state, ["missing", "'resnet50'"]),
        ("small-cnn", resnet18_state, ["missing", "'small-cnn'"]),
        (
            "resnet18",
            lambda: {**resnet18_state(), "extra": torch.zeros(1)},
            ["1 tensor is unexpected: 'extra'"],
        ),
        (
            "resnet18",
            lambda: {**resnet18_state(), "conv1.weight": torch.zeros(64, 1, 7, 7)},
            ["another shape", "'conv1.weight'"],
        ),
    ],
)
def test_the_weights_of_another_network_are_refused(tmp_path, name, state, words):
    path = write(tmp_path / "w.safetensors", state())
    with pytest.raises(UserError) as caught:
        build(name, weights=str(path))
    for word in (str(path), "do not fit", *words):
        assert word in str(caught.value)


class Server(http.server.BaseHTTPRequestHandler):
    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """torchvision's hub on this machine: points it at a path of a server, or where none listens."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    weights = models.ResNet18_Weights.IMAGENET1K_V1.value
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))

        def point(path: str) -> None:
            port = server.server_port if path else bound.getsockname()[1]
            monkeypatch.setattr(weights, "url", f"http://127.0.0.1:{port}/{path or 'none.pth'}")

        yield point
    server.shutdown()
    server.server_close()


def test_imagenet_weights_come_from_torchvisions_hub(tmp_path, monkeypatch, hub):
    path = write(tmp_path / "w.pth", resnet18_state())
    monkeypatch.setattr(Server, "content", path.read_bytes())
    hub(f"resnet18-{hashlib.sha256(Server.content).hexdigest()[:8]}.pth")
    network = build("resnet18", weights="imagenet")
    weight = network.featurizer.conv1.weight
    assert torch.equal(weight, resnet18_state()["conv1.weight"])


@pytest.mark.parametrize("path", ["", "resnet18-0123abcd.pth"], ids=["unreachable", "wrong file"])
def test_imagenet_weights_that_cannot_be_had_say_what_to_do(monkeypatch, hub, path):
    monkeypatch.setattr(Server, "content", b"a login page, say")
    hub(path)
    with pytest.raises(UserError, match=r"'resnet18'.*--weights FILE.*--weights none"):
        build("resnet18", weights="imagenet")


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "small-cnn"])
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_scale(name, frozen):
    torch.manual_seed(0)
    network = build(name, freeze_bn=frozen)
    algorithm = ERM(network, n_domains=1)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [(m.running_mean.clone(), m.running_var.clone()) for m in norms]
    scales = [m.weight.clone() for m in norms]
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
    for _ in range(2):
        algorithm.eval()  # as an evaluation between two steps does
        algorithm.train()
        optimizer.zero_grad()
        prepared = algorithm.prepare([Batch(images(), torch.arange(4))])
        algorithm(prepared).total.backward()
        optimizer.step()
    assert norms
    for norm, (mean, var) in zip(norms, before, strict=True):
        assert norm.weight.grad is not None
        assert norm.bias.grad is not None
        assert torch.equal(norm.running_mean, mean) == frozen
        assert torch.equal(norm.running_var, var) == frozen
        assert norm.training != frozen
    assert not all(torch.equal(n.weight, old) for n, old in zip(norms, scales, strict=True))


def test_dropout_acts_in_training_only():
    network = build("resnet18", dropout=0.4)
    whole = network.eval().features(images())
    assert network.draw_mask(images()) is None
    torch.manual_seed(0)
    network.train()
    first, second = (network.features(images(), network.draw_mask(images())) for _ in range(2))
    assert not torch.equal(first, second)
    kept = first != 0
    torch.testing.assert_close(first[kept], whole[kept] / 0.6)
    dropped = (~kept & (whole != 0)).sum() / (whole != 0).sum()
    assert dropped == pytest.approx(0.4, abs=0.06)  # of 2048: more than five deviations


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("mobilenetv3_small_050", 32),
        ("dla46_c", 32),  # its classifier is a convolution
        ("deit_tiny_distilled_patch16_224", 224),  # it has two
    ],
)
def test_library_state_gives_the_library_the_same_logits(name, size):
    network = build(name, image_size=size).eval()
    make = models.get_model if name == "resnet18" else timm.create_model
    theirs = make(name, num_classes=5)
    theirs.load_state_dict(library_state(name, network, size), strict=True)
    x = network.normalize(images(2, size))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(x), network(x))


@pytest.mark.parametrize("name", ["levit_128s", "volo_d1_224"])
def test_library_state_is_refused_where_it_would_be_wrong(name):
    network = build(name, image_size=224).eval()
    with pytest.raises(UserError, match=rf"classifier of '{name}' is not a single .*load_model"):
        library_state(name, network, 224)


@pytest.fixture(scope="module")
def lite0() -> Path:
    path = WEIGHTS / f"{LITE0}.safetensors"
    if not path.exists():
        pytest.skip(f"no {path.name} in $STEPPE_WEIGHTS")
    return path


def test_efficientnet_lite0_with_imagenet_weights_is_timms(lite0):
    theirs = timm.create_model(LITE0)
    theirs.load_state_dict(load_file(lite0))
    theirs.reset_classifier(0)
    network = build(LITE0, weights=str(lite0)).eval()
    config = timm.data.resolve_model_data_config(theirs)
    doodles = load("Doodles").domains[0].images
    pixels = [Image.fromarray(doodles[i]).resize((224, 224)) for i in range(2)]
    x = [TF.normalize(TF.to_tensor(p), config["mean"], config["std"]) for p in pixels]
    with torch.no_grad():
        expected = theirs.eval()(torch.stack(x))
        found = network.features(torch.stack([TF.pil_to_tensor(p) for p in pixels]))
    assert torch.equal(found, expected)
    assert found.shape == (2, 1280)


def test_features_of_imagenet_weights_tell_photos_apart(lite0):
    """The nearest mean of three photos of each class, for three others: chance is 1/7."""
    if not (PACS / "photo").is_dir():
        pytest.skip("no photos in $STEPPE_PACS")
    network = build(LITE0, image_size=224, weights=str(lite0)).eval()
    classes = sorted(folder for folder in (PACS / "photo").iterdir() if folder.is_dir())
    paths = [path for folder in classes for path in sorted(folder.iterdir())[:6]]
    pixels = [TF.pil_to_tensor(Image.open(p).convert("RGB").resize((224, 224))) for p in paths]
    with torch.no_grad():
        features = nn.functional.normalize(network.features(torch.stack(pixels)))
    features = features.view(len(classes), 6, -1)
    means = features[:, :3].mean(1)
    predicted = (features[:, 3:] @ means.T).argmax(2)
    accuracy = (predicted == torch.arange(len(classes))[:, None]).float().mean()
    assert accuracy > 0.8
