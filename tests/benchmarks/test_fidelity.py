"""`benchmarks/fidelity.py`: the cosines are of the right differences, and tell precisions apart."""

import fidelity
import pytest
import torch
from PIL import Image
from task import TaskOptions, prepare

from steppe.errors import UserError
from tests.optim import reference


@pytest.fixture(scope="module")
def task():
    return prepare(TaskOptions(device="cpu", steps=20, batch=16, batches=2))


def test_radii_are_those_that_a_search_draws():
    assert fidelity.radii() == (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def test_differences_are_those_of_algorithm_1(task):
    model = task.model.double()
    x, y = task.batches[0]
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(theta):
        parts = theta.split([s.numel() for s in shapes])
        point = {n: t.reshape(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        out = torch.func.functional_call(model, point, (x.double(),))
        return torch.nn.functional.cross_entropy(out, y)

    grad = torch.func.grad(loss)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    h0, h1 = fidelity.differences(model, x.double(), y, 0.1, "fp64")
    g0 = grad(theta)
    torch.testing.assert_close(h0, reference.sam(grad, theta, 0.1) - g0, rtol=0, atol=1e-12)
    torch.testing.assert_close(h1, reference.gam(grad, theta, 0.1, 1.0) - g0, rtol=0, atol=1e-12)
    model.float()


def test_lower_precision_is_less_faithful(task):
    rows = fidelity.fidelity(task, [0.1], ["fp32", "bf16"])
    fp32, bf16 = rows
    for name in ("h0", "h1"):
        assert fp32[name]["mean"] > 0.9999
        assert bf16[name]["worst"] <= bf16[name]["mean"] < fp32[name]["mean"]


@pytest.mark.slow  # a cold compiler takes half a minute
def test_compiled_code_is_as_faithful(task):
    rows = fidelity.fidelity(task, [0.1], ["fp32"], compiled=True)
    assert task.model.compiled is not None
    task.model.compiled = None
    assert min(rows[0][name]["mean"] for name in ("h0", "h1")) > 0.9999


def test_mistakes_are_named(tmp_path):
    resnet, small = (TaskOptions(device="cpu", backbone=b) for b in ("resnet18", "small-cnn"))
    with pytest.raises(UserError, match="--images FOLDER"):
        prepare(resnet)
    with pytest.raises(UserError, match="--backbone"):
        prepare(small, tmp_path)
    with pytest.raises(UserError, match="--weights"):
        prepare(small, weights=tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="is not a folder"):
        prepare(resnet, tmp_path / "none")
    with pytest.raises(UserError, match="has 0 domains"):
        prepare(resnet, tmp_path)


def test_a_folder_of_images(tmp_path):
    for folder in ("photo/cat", "photo/dog", "sketch/cat", "sketch/dog"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8), (200, 10, 10)).save(tmp_path / folder / "1.png")
    options = TaskOptions(device="cpu", backbone="resnet18", steps=1, batch=3, batches=1)
    task = prepare(options, tmp_path)
    assert task.about["data"] == f"{tmp_path.name} (photo, sketch)"
    assert task.batches[0][0].shape == (3, 3, 224, 224)
    assert task.model.classifier.out_features == 2
