"""The arithmetic on lists of tensors against the same on one flat float64 vector."""

import pytest
import torch

from steppe.optim import vectors

LISTS = {
    "plain": [torch.randn(3, 4), torch.randn(()), torch.randn(70_000)],
    "float64": [torch.randn(5).double(), torch.randn(2, 2).double()],
    "channels-last": [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "transposed": [torch.randn(3, 4).t(), torch.randn(7)],
    "half": [torch.full((4096,), 300.0, dtype=torch.float16)],  # its square is no fp16 number
    "mixed": [torch.randn(5).bfloat16(), torch.randn(5), torch.randn(5).double()],
    "empty": [torch.zeros(0), torch.ones(4)],
}


def flat(xs):
    return torch.cat([x.double().reshape(-1) for x in xs])


@pytest.mark.parametrize("name", LISTS)
def test_norm(name):
    xs = LISTS[name]
    assert float(vectors.norm(xs)) == pytest.approx(float(flat(xs).norm()), rel=1e-5)


@pytest.mark.parametrize("name", LISTS)
def test_dot(name):
    xs = LISTS[name]
    ys = [torch.rand_like(x) - 0.2 for x in xs]
    got = float(vectors.dot(xs, ys, scratch=vectors.like(xs)))
    error = 2e-2 if name in ("mixed", "half") else 1e-4  # products are rounded to their type
    size = float(flat(xs).norm() * flat(ys).norm())
    assert got == pytest.approx(float(flat(xs) @ flat(ys)), abs=error * size)


def test_blocks_are_small_and_cover_everything_once(monkeypatch):
    monkeypatch.setattr(vectors, "CPU_BLOCK", 64)
    kernel = torch.zeros(6, 2, 2, 2).to(memory_format=torch.channels_last)
    xs = [torch.zeros(()), torch.zeros(70), kernel]
    ys = vectors.like(xs)
    torch._foreach_zero_(ys)
    for some, others in vectors.blocks(xs, ys):
        assert sum(x.nbytes for x in some) <= 64
        torch._foreach_add_(some, 1.0)
        torch._foreach_add_(others, some)
    for x, y in zip(xs, ys, strict=True):
        assert bool((x == 1.0).all() and (y == 1.0).all())


@pytest.mark.parametrize("spend", [True, False])
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)])
def test_add(scale, spend):
    xs, ys = [torch.ones(3), torch.zeros(2)], [torch.full((3,), 4.0), torch.full((2,), 8.0)]
    vectors.add_(xs, ys, scale, spend=spend)
    assert flat(xs).tolist() == [2.0, 2.0, 2.0, 2.0, 2.0]
    if not spend:
        assert flat(ys).tolist() == [4.0, 4.0, 4.0, 8.0, 8.0]
