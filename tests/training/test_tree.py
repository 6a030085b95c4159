"""Trees of state through JSON and safetensors: the same types, layouts and bits come back."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load, save

from steppe.training import randomness, tree

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def make_tensor(shape, dtype, order, seed):
    """Random bits, NaN and infinities among them, laid out in memory in any order of dimensions."""
    generator = torch.Generator().manual_seed(seed)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if dtype is torch.bool:
        return tensor.copy_(torch.rand(shape, generator=generator) < 0.5)
    size = tensor.element_size()
    raw = torch.randint(256, (tensor.numel() * size,), generator=generator, dtype=torch.uint8)
    return tensor.copy_(raw.view(dtype).reshape(shape))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=5))
    order = draw(st.permutations(range(len(shape))))
    return make_tensor(shape, draw(st.sampled_from(DTYPES)), order, draw(st.integers(0, 2**32)))


arrays = st.builds(
    lambda shape, dtype, seed: (
        np.random.RandomState(seed).randint(256, size=(*shape, 16)).astype(np.uint8).view(dtype)
    ),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(("uint8", "uint32", "uint64", "int64", "float32", "float64")),
    st.integers(0, 2**32 - 1),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.text("ab/1$", max_size=3) | st.integers(-2, 12) | st.sampled_from(["$tensor", "$dict"])
trees = st.recursive(
    plain | tensors() | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def through_a_file(value):
    parts = {}
    text = json.dumps(tree.to_json(value, parts))
    return tree.from_json(json.loads(text), load(save(parts)))


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.numel():
            assert one.stride() == other.stride()
        assert torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, other)))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert list(map(type, one)) == list(map(type, other))
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert repr(one) == repr(other)  # tells -0.0 from 0.0, and NaN equals NaN


@given(trees)
def test_round_trip(value):
    assert_same(value, through_a_file(value))


def test_tensors_that_share_memory_or_a_path():
    whole = torch.arange(6.0)
    value = {"a": {"b": whole[:3]}, "a/b": whole[3:], 1: whole, "1": whole.flip(0), "c": whole}
    assert_same(value, through_a_file(value))


@pytest.mark.parametrize(
    "value", [{"x": {1, 2}}, {"x": object()}, {("a", "b"): 1}, np.array([object()])]
)
def test_what_json_cannot_hold_is_refused_when_written(value):
    with pytest.raises(TypeError, match="a checkpoint cannot hold"):
        tree.to_json(value, {})


def test_the_generators_draw_on():
    cpu = torch.device("cpu")

    def draw():
        return random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))

    before = randomness.get_state(cpu)
    try:
        randomness.seed_all(1)
        draw()  # leaves half a pair of normals behind, in python and in numpy
        state = through_a_file(randomness.get_state(cpu))
        expected = [draw() for _ in range(3)]
        randomness.set_state(state, cpu)
        assert [draw() for _ in range(3)] == expected
    finally:
        randomness.set_state(before, cpu)
