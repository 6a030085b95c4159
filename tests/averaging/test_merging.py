"""Means and lines in weight space: exact where that is promised, and rounded once elsewhere."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steppe.averaging.merging import Soup, State, between


def network(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    scale = 10.0 ** torch.randint(-30, 30, (50,))
    return {
        "network.w": torch.randn(50) * scale,
        "other.w": torch.randn(3),
        "n": torch.tensor(seed),
    }


def same_bits(a: State, b: State) -> bool:
    def raw(state: State) -> dict[str, bytes]:
        return {name: value.numpy().tobytes() for name, value in state.items()}

    return raw(a) == raw(b)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20])
def test_equal_networks_give_the_same_bits(k):
    one = network(0)
    one["network.w"][:3] = torch.tensor([-0.0, 1e-45, 3e38])
    soup = Soup()
    for _ in range(k):
        assert same_bits(soup.mean(one), one)
        soup.add({name: value.clone() for name, value in one.items()})
    assert same_bits(soup.mean(), one)


def test_the_mean_is_the_exact_one_rounded_once():
    """A running mean in float32 would lose the small ones."""
    states = [network(seed) for seed in range(20)]
    states[0]["network.w"][0], states[1]["network.w"][0] = 1e8, -1e8
    for state in states[2:]:
        state["network.w"][0] = 1e-3
    soup = Soup("network.")
    for state in states[:-1]:
        soup.add(state)
    tried = soup.mean(states[-1])
    soup.add(states[-1])
    assert same_bits(tried, soup.mean())
    columns = zip(*(state["network.w"].double().tolist() for state in states), strict=True)
    exact = np.array([math.fsum(column) / 20 for column in columns])
    np.testing.assert_array_equal(soup.mean()["network.w"].numpy(), exact.astype(np.float32))
    for name in ("other.w", "n"):  # counters, and what does not start with the prefix
        assert torch.equal(soup.mean()[name], states[0][name])


def test_networks_are_not_kept():
    soup, kept = Soup(), []
    for seed in range(3):
        state = network(seed)
        kept.append(weakref.ref(state["network.w"]))
        soup.add(state)
        del state
    assert all(value() is None for value in kept)


def test_both_ends_of_a_line_are_exact():
    start, end = network(0), network(1)
    for i, a in enumerate((0.0, -0.0)):
        start["network.w"][i], end["network.w"][i] = a, -a
    assert same_bits(between(start, end, 1.0), end)
    assert same_bits(between(start, end, 0.0), {**start, "n": end["n"]})
    assert same_bits(between(start, end, 0.0, "network."), {**end, "network.w": start["network.w"]})


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_a_linear_networks_logits_are_linear_in_alpha(alpha):
    start, end, mixed = (nn.Linear(20, 5, dtype=torch.float64) for _ in range(3))
    mixed.load_state_dict(between(start.state_dict(), end.state_dict(), alpha))
    x = torch.randn(8, 20, dtype=torch.float64)
    expected = (1 - alpha) * start(x) + alpha * end(x)
    torch.testing.assert_close(mixed(x), expected, rtol=1e-12, atol=1e-12)
