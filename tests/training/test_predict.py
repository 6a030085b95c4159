"""A model on files without labels: what `preprocess` and the model give, one image at a time."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")

import torch
from PIL import Image

from steppe.errors import UserError
from steppe.training import TrainedModel, find_images, load_model, predict_images, train

from .test_models import config, paint_domain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and new images beside it."""
    root = tmp_path_factory.mktemp("predict")
    for seed, domain in enumerate(("ink", "oil", "pen")):
        paint_domain(root / "data" / domain, seed)
    paint_domain(root / "new", 9, n=3)
    train(config(root / "data", steps=9), root / "run")
    return root


def by_hand(model: TrainedModel, path: str) -> tuple[str, float]:
    with torch.no_grad():
        p = model(model.preprocess(path)).softmax(1)[0]
    return model.classes[int(p.argmax())], float(p.max())


@pytest.mark.parametrize(("batch_size", "workers"), [(64, 0), (2, 0), (4, 2)])
def test_predictions_are_the_models(folder, device, batch_size, workers):
    model = load_model(folder / "run", device=str(device))
    files = find_images([folder / "new"])
    assert len(files) == 9
    found = list(predict_images(model, files, batch_size=batch_size, workers=workers))
    assert [one.file for one in found] == files
    reference = load_model(folder / "run")
    for one in found:
        label, probability = by_hand(reference, one.file)
        assert (one.label, one.problem) == (label, None)
        assert one.probability == pytest.approx(probability, abs=1e-5)


def test_what_cannot_be_read_stays_in_its_place(folder, tmp_path):
    """Also where a whole batch cannot, or the first or the last one of all."""
    model = load_model(folder / "run")
    good = find_images([folder / "new"])[:3]
    (tmp_path / "words.png").write_text("words")
    bad = [str(tmp_path / "words.png"), str(tmp_path / "gone.png")]
    files = [*bad, good[0], bad[0], *good[1:], bad[1]]
    found = list(predict_images(model, files, batch_size=2))
    assert [one.file for one in found] == files
    for one in found:
        if one.file in bad:
            assert (one.label, one.probability) == (None, None)
            assert f"image {one.file} cannot be read" in str(one.problem)
        else:
            assert one.label == by_hand(model, one.file)[0]
    assert list(predict_images(model, bad, batch_size=2))[1].problem is not None


def test_gray_models_see_color_in_gray(tmp_path):
    train(config("RotatedDigits", targets="75", image_size=8, steps=1), tmp_path / "run")
    model = load_model(tmp_path / "run")
    Image.effect_noise((20, 20), 90).convert("RGB").save(tmp_path / "x.png")
    (found,) = predict_images(model, [tmp_path / "x.png"])
    label, probability = by_hand(model, str(tmp_path / "x.png"))
    assert (found.label, found.probability) == (label, pytest.approx(probability, abs=1e-6))
    assert model.trained_on == ("0", "15", "30", "45", "60")


def test_paths_become_files(folder, tmp_path):
    one = folder / "new" / "bee" / "1.png"
    strange = tmp_path / "scan"  # a file is taken whatever it is called
    strange.write_bytes(one.read_bytes())
    assert find_images([one, strange]) == [str(one), str(strange)]
    assert find_images([folder / "new" / "bee"]) == [
        str(folder / "new" / "bee" / f"{i}.png") for i in range(3)
    ]
    Image.new("L", (8, 8)).save(tmp_path / "moving.gif")
    assert find_images([tmp_path]) == [str(tmp_path / "moving.gif")]
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_images([one, tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no images: expected files with .jpg"):
        find_images([tmp_path / "empty"])


def test_a_model_that_looks_at_batches_says_so(folder, tmp_path, caplog):
    train(config(folder / "data", algorithm="MTL", steps=1), tmp_path / "run")
    list(predict_images(load_model(tmp_path / "run"), find_images([folder / "new"])))
    assert "MTL uses statistics of the batch" in caplog.text


def test_a_batch_has_an_image(folder):
    with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
        list(predict_images(load_model(folder / "run"), ["x.png"], batch_size=0))


def test_the_next_batch_is_asked_before_the_answer_is_awaited(folder, monkeypatch):
    """A GPU that waits for the host to print is idle."""
    from steppe.training import predict

    order: list[str] = []
    launch = predict._launch

    def watched(*args: Any) -> Any:
        order.append("ask")
        launched = launch(*args)

        def answer() -> Any:
            order.append("answer")
            yield from launched

        return answer()

    monkeypatch.setattr(predict, "_launch", watched)
    files = find_images([folder / "new"])
    list(predict_images(load_model(folder / "run"), files, batch_size=3))
    assert order == ["ask", "ask", "answer", "ask", "answer", "answer"]
