"""A finished run's model: the trainer's own logits, on any data, and in other libraries' hands."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("timm")

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as T

from steppe.algorithms import ERM
from steppe.domains import Arrays, Domain, catalog, load, register_dataset
from steppe.errors import RunError, UserError
from steppe.registry import Registry
from steppe.training import (
    RunDirectory,
    TrainedModel,
    evaluate_run,
    export_run,
    load_model,
    make_config,
    select,
    setup,
    train,
)
from steppe.training.backbones import build_network

CLASSES = ("ant", "bee", "cat")
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))


def paint(path: Path, label: int, seed: int) -> None:
    """A noisy square in the class's colour, of any shape."""
    rng = np.random.default_rng([label, seed])
    height, width = rng.integers(14, 30, size=2)
    pixels = rng.normal(COLOURS[label], 60, size=(height, width, 3)).clip(0, 255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def paint_domain(root: Path, seed: int, classes: tuple[str, ...] = CLASSES, n: int = 6) -> Path:
    for name in classes:
        for i in range(n):
            paint(root / name / f"{i}.png", CLASSES.index(name), 100 * seed + i)
    return root


def config(dataset: Path | str, **changes: Any) -> Any:
    values = {
        "dataset": str(dataset),
        "targets": "pen",
        "weights": "none",
        "backbone": "small-cnn",
        "image_size": 16,
        "batch_size": 4,
        "steps": 25,
        "checkpoint_every": 3,
        "device": "cpu",
    }
    return make_config({**values, **changes})


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Someone's own images."""
    root = tmp_path_factory.mktemp("somebody") / "own images"
    for seed, domain in enumerate(("ink", "oil", "pen")):
        paint_domain(root / domain, seed)
    return root


@pytest.fixture(scope="module")
def run(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(config(own), path)
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images with one channel."""
    path = tmp_path_factory.mktemp("runs") / "digits"
    train(make_config({"dataset": "RotatedDigits", "targets": "75", "steps": 2}), path)
    return path


def pixels(size: int = 16, n: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def scores_by_hand(model: Any, domain: Path) -> tuple[float, float]:
    """Accuracy and cross-entropy over a folder of classes, one image at a time."""
    right, losses = [], []
    for path in sorted(domain.rglob("*.png")):
        with Image.open(path) as image, torch.no_grad():
            p = model(model.preprocess(image)).double().softmax(1)[0]
        label = model.classes.index(path.parent.name)
        right.append(int(p.argmax()) == label)
        losses.append(-float(p[label].log()))
    return float(np.mean(right)), float(np.mean(losses))


def assert_by_hand(found: Any, model: Any, domain: Path) -> None:
    accuracy, cross_entropy = scores_by_hand(model, domain)
    assert found.accuracy == pytest.approx(accuracy)
    assert found.cross_entropy == pytest.approx(cross_entropy, rel=1e-4)
    assert found.images == len(list(domain.rglob("*.png")))


def trained(settings: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The very algorithm that a run has trained."""
    built = []

    def keep(*arguments: Any) -> Any:
        built.append(build(*arguments))
        return built[-1]

    build = setup.build
    with monkeypatch.context() as patch:
        patch.setattr(setup, "build", keep)
        train(settings, path)
    (algorithm,) = built
    return algorithm.eval()


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_loaded_model_is_the_trained_one(run, own, tmp_path, monkeypatch, which):
    steps = config(own).steps
    if which == "best":
        # The weights of the best record are the last ones of a run that ends there.
        index = json.loads((run / "checkpoint" / "best" / "state.json").read_text())
        assert index["step"] < steps - 1
        steps = index["step"] + 1
    algorithm = trained(config(own, steps=steps), tmp_path / "again", monkeypatch)
    model = load_model(run, which)
    assert (model.which, model.step) == (which, steps - 1)
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        expected = algorithm.predict(pixels())
        assert torch.equal(model(pixels()), expected)
    assert not torch.equal(load_model(run, "last")(pixels()), load_model(run, "best")(pixels()))


def test_what_training_announces_is_what_is_used(run, own, tmp_path):
    announced = select(RunDirectory(run).records())["step"]
    assert announced < config(own).steps - 1, "or the last would do"
    assert torch.equal(load_model(run)(pixels()), load_model(run, "best")(pixels()))
    assert load_model(run).step == evaluate_run(run)["pen"].step == announced
    assert export_run(run, tmp_path / "m.safetensors")["step"] == str(announced)
    without = shutil.copytree(run, tmp_path / "without")
    shutil.rmtree(without / "checkpoint" / "best")
    assert (load_model(without).which, load_model(without).step) == ("last", 24)
    assert evaluate_run(without)["pen"].to_json()["which"] == "last"
    assert torch.equal(load_model(without)(pixels()), load_model(run, "last")(pixels()))


def test_three_lines_of_python(run, own):
    model = load_model(run)
    image = Image.open(own / "pen" / "bee" / "0.png")
    name = model.classes[model(model.preprocess(image)).argmax()]
    image.close()
    assert model.classes == CLASSES
    assert name == "bee", "25 steps are enough to tell green from red"


def test_preprocess_is_what_evaluation_does(run, own):
    model = load_model(run)
    shown = Image.open(own / "ink" / "cat" / "1.png")
    resized = T.PILToTensor()(T.Resize((16, 16))(shown))
    others = [shown, shown.convert("RGBA"), shown.convert("RGB").resize((16, 16), 2)]
    batch = model.preprocess(*others)
    assert batch.shape == (3, 3, 16, 16)
    assert batch.dtype == torch.uint8
    for image in batch:
        assert torch.equal(image, resized)
    grey = model.preprocess(shown.convert("L"))
    assert torch.equal(grey[0, 0], grey[0, 2])
    shown.close()


def test_preprocess_in_grey_for_a_model_of_grey_images(digits):
    model = load_model(digits)
    image = Image.fromarray(load("RotatedDigits").domains[0].images[3][..., 0])
    batch = model.preprocess(image, image.convert("RGB"))
    assert batch.shape == (2, 1, 8, 8)
    assert torch.equal(batch[0], batch[1])


def test_preprocess_takes_paths_images_tensors_and_lists(run, own):
    model = load_model(run)
    path = own / "ink" / "cat" / "1.png"
    with Image.open(path) as shown:
        tensor = T.PILToTensor()(shown)
        (expected,) = model.preprocess(shown)
        batch = model.preprocess(
            path, str(path), [path, shown], (tensor,), tensor[None].repeat(2, 1, 1, 1)
        )
    assert batch.shape == (7, 3, 16, 16)
    assert all(torch.equal(image, expected) for image in batch)
    (grey,) = model.preprocess(tensor[:1])
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], expected[0])


def test_preprocess_says_what_is_no_image(run, own, tmp_path):
    model = load_model(run)
    (tmp_path / "x.png").write_text("words")
    deep = Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16))
    for wrong, words in [
        (tmp_path / "x.png", "x.png cannot be read"),
        (tmp_path / "gone.png", "gone.png cannot be read: No such file"),
        (torch.zeros(3, 8, 8), "uint8 pixels from 0 to 255, but the tensor is torch.float32"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"shape \(8, 8\) is not an image"),
        (deep, "mode is 'I;16'; convert it to 8 bits"),
        (7, "7 is not an image: pass a path"),
        ([], "at least one"),
    ]:
        with pytest.raises(UserError, match=words):
            model.preprocess(wrong)


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    away = folder.with_name("away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


def test_a_model_outlives_its_dataset(run, own, tmp_path):
    before = load_model(run)(pixels())
    elsewhere = paint_domain(tmp_path / "elsewhere", 7)
    with gone(own):
        assert torch.equal(load_model(run)(pixels()), before)
        export_run(run, tmp_path / "model.safetensors")
        assert evaluate_run(run, elsewhere)["elsewhere"].images == 18
        with pytest.raises(UserError, match="own images"):
            evaluate_run(run)


def test_a_run_can_be_moved(run, tmp_path):
    shutil.copytree(run, tmp_path / "moved")
    assert torch.equal(load_model(tmp_path / "moved")(pixels()), load_model(run)(pixels()))


def test_evaluation_of_the_runs_own_targets(run, own):
    scores = evaluate_run(run, which="last")
    assert list(scores) == ["pen"]
    assert_by_hand(scores["pen"], load_model(run, "last"), own / "pen")
    last = RunDirectory(run).records()[-1]["domains"]["pen"]
    parts = [last[part] for part in ("test", "oracle")]
    right = sum(part["accuracy"] * part["images"] for part in parts)
    assert scores["pen"].accuracy == pytest.approx(right / scores["pen"].images)
    best = evaluate_run(run, which="best")["pen"]
    assert_by_hand(best, load_model(run, "best"), own / "pen")
    assert best != scores["pen"]


def test_evaluation_of_a_folder_of_classes(run, tmp_path):
    folder = paint_domain(tmp_path / "chalk", 8)
    scores = evaluate_run(run, folder)
    assert list(scores) == ["chalk"]
    assert_by_hand(scores["chalk"], load_model(run), folder)


def test_evaluation_of_a_folder_of_domains(run, tmp_path):
    """One of them is called as a class is, and one lacks the first class."""
    paint_domain(tmp_path / "many" / "ant", 8)
    paint_domain(tmp_path / "many" / "wax", 9, classes=("bee", "cat"))
    scores = evaluate_run(run, tmp_path / "many")
    assert list(scores) == ["ant", "wax"]
    for name, found in scores.items():
        assert_by_hand(found, load_model(run), tmp_path / "many" / name)


def test_classes_keep_the_models_numbers_where_some_are_missing(run, tmp_path):
    folder = paint_domain(tmp_path / "cats", 8, classes=("cat",))
    model = load_model(run)
    assert_by_hand(evaluate_run(run, folder)["cats"], model, folder)
    assert evaluate_run(run, folder)["cats"].accuracy > 0.5, "a blue one is a cat"


def test_classes_that_the_model_does_not_know_are_an_error(run, own, tmp_path):
    folder = paint_domain(tmp_path / "zoo", 8)
    shutil.copytree(folder / "ant", folder / "aardvark")
    for data in (folder, folder.parent):
        with pytest.raises(UserError, match="unknown to the model: aardvark. Known: ant, bee, cat"):
            evaluate_run(run, data)
    # In the run's own data too, where it would shift the numbers of all the others.
    shutil.copytree(folder / "ant", own / "pen" / "aardvark")
    try:
        with pytest.raises(UserError, match="unknown to the model: aardvark"):
            evaluate_run(run)
    finally:
        shutil.rmtree(own / "pen" / "aardvark")


def test_evaluation_of_a_dataset_by_name(digits):
    scores = evaluate_run(digits, "rotateddigits")
    assert list(scores) == ["0", "15", "30", "45", "60", "75"]
    assert scores["75"] == evaluate_run(digits)["75"]
    assert scores["75"] != scores["0"]


def test_coloured_files_for_a_model_of_grey_images(digits, tmp_path):
    domain = load("RotatedDigits").domains[5]
    for i in range(40):
        path = tmp_path / "75" / str(domain.labels[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(domain.images[i][..., 0]).save(path)
    found = evaluate_run(digits, tmp_path / "75")["75"]
    assert_by_hand(found, load_model(digits), tmp_path / "75")


def test_channels_that_no_file_has_are_an_error(run, monkeypatch):
    monkeypatch.setattr(catalog, "DATASETS", Registry("dataset", lambda: catalog.BUILT_IN))

    @register_dataset("Stereo", domains=["left"], n_classes=3, channels=2)
    def stereo(_: Path) -> Any:
        return CLASSES, [Domain("left", Arrays(np.zeros((3, 9, 9, 2), np.uint8)), np.arange(3))]

    with pytest.raises(UserError, match="'left' have 2 channels, but the model takes 3"):
        evaluate_run(run, "stereo")
    network = build_network("mnist-cnn", n_classes=3, image_size=9, channels=2)
    model = TrainedModel(ERM(network, 1), CLASSES, 9, step=0)
    with pytest.raises(UserError, match="takes 2 channels"):
        model.preprocess(Image.new("RGB", (9, 9)))


def test_what_is_no_finished_run_says_so(run, own, tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        load_model(tmp_path)
    RunDirectory(tmp_path / "new").create(config(own))
    with pytest.raises(UserError, match="has not started yet"):
        load_model(tmp_path / "new")
    with pytest.raises(UserError, match="which='first': expected last, best, or step:N"):
        load_model(run, "first")
    with pytest.raises(UserError, match="nonesuch is neither a folder nor"):
        evaluate_run(run, "nonesuch")

    broken = shutil.copytree(run, tmp_path / "broken")
    text = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**text, "version": 99}))
    with pytest.raises(UserError, match="newer steppe"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(text))
    weights = broken / "checkpoint" / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(RunError, match=r"damaged.*intact: step 24, step 21\. .*--which step:24"):
        load_model(broken, "best")
    shutil.rmtree(broken / "checkpoint")
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_model(broken)
    with pytest.raises(UserError, match="no best checkpoint"):
        load_model(broken, "best")
