"""What optimizers rely on: every algorithm's loss is a function of the weights, and of no luck."""

import copy
import inspect
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from steppe.algorithms import Algorithm, Prepared, algorithm_names, build_algorithm
from steppe.domains.batches import Batch
from steppe.training.backbones import build_network
from tests.training.axes import OPTIONS

SIZES = (6, 4, 6)
CLASSES = 5


def batches(seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator),
            torch.randint(0, CLASSES, (n,), generator=generator),
        )
        for n in SIZES
    ]


def build(name: str, **network: object) -> Algorithm:
    torch.manual_seed(0)
    settings = {"n_classes": CLASSES, "image_size": 8, "dropout": 0.5, "freeze_bn": False}
    built = build_network("small-cnn", **{**settings, **network})
    options = {"p": 1.0} if name == "MixStyle" else OPTIONS.get(name, {})
    return build_algorithm(name, built, len(SIZES), **options).train()


def generators() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def own_state(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """Everything but batch norm's statistics, which the optimizers keep still themselves."""
    norms = {n for n, m in algorithm.named_modules() if isinstance(m, nn.BatchNorm2d)}
    return {
        name: value.clone()
        for name, value in algorithm.state_dict().items()
        if name.rpartition(".")[0] not in norms or not name.endswith(("mean", "var", "tracked"))
    }


def tensors(prepared: object) -> Iterator[torch.Tensor]:
    if isinstance(prepared, torch.Tensor):
        yield prepared
    elif isinstance(prepared, Prepared):
        yield from tensors(list(vars(prepared).values()))
    elif isinstance(prepared, dict):
        yield from tensors(list(prepared.values()))
    elif isinstance(prepared, list | tuple):
        for value in prepared:
            yield from tensors(value)


@pytest.mark.parametrize("name", algorithm_names())
def test_forward_has_no_side_effects_and_no_luck(name: str) -> None:
    algorithm = build(name)
    for seed in range(2):  # the second step has a state to remember
        prepared = algorithm.prepare(batches(seed))
        firsts = {}
        for objective in algorithm.objectives():
            kept = [t.clone() for t in tensors(prepared)]
            state, drawn = own_state(algorithm), generators()
            first = algorithm(prepared, objective.name)
            aux = {key: value.detach() for key, value in first.aux.items()}
            again = [algorithm(prepared, objective.name, first=aux) for _ in range(3)]
            for losses in again:
                assert torch.equal(losses.total, first.total)
                assert losses.parts.keys() == first.parts.keys()
                assert all(torch.equal(losses.parts[key], first.parts[key]) for key in first.parts)
            assert generators() == drawn
            assert all(torch.equal(a, b) for a, b in zip(kept, tensors(prepared), strict=True))
            after = own_state(algorithm)
            assert all(torch.equal(after[key], value) for key, value in state.items())
            # A function of the weights: another value elsewhere, the same one back here.
            moved = copy.deepcopy(algorithm)
            with torch.no_grad():
                for parameter in moved.objectives()[0].parameters:
                    parameter.add_(0.01 * torch.randn_like(parameter))
                for parameter in moved.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.1)
            assert not torch.equal(moved(prepared, objective.name, first=aux).total, first.total)
            assert torch.equal(algorithm(prepared, objective.name, first=aux).total, first.total)
            firsts[objective.name] = first
        algorithm.commit(prepared, firsts)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_parameter_is_learned(name: str) -> None:
    """Each trainable parameter belongs to an objective and gets a gradient from it."""
    algorithm = build(name, dropout=0.0)
    prepared = algorithm.prepare(batches())
    learned = set()
    for objective in algorithm.objectives():
        algorithm.zero_grad()
        algorithm(prepared, objective.name).total.backward()
        for parameter in objective.parameters:
            assert parameter.grad is not None
            learned.add(parameter)
    assert learned == {p for p in algorithm.parameters() if p.requires_grad}


@pytest.mark.parametrize("name", algorithm_names())
def test_draws_are_new_in_every_step(name: str) -> None:
    """With dropout on, two preparations of the same batches differ; with a seed, they agree."""
    algorithm = build(name)
    torch.manual_seed(1)
    first, second = (list(tensors(algorithm.prepare(batches()))) for _ in range(2))
    torch.manual_seed(1)
    again = list(tensors(algorithm.prepare(batches())))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, second, strict=False)
    )


@pytest.mark.parametrize("name", algorithm_names())
def test_predicts_pixels_and_what_normalization_makes_of_them(name: str) -> None:
    algorithm = build(name).eval()
    images = batches()[0].images
    logits = algorithm.predict(images)
    assert logits.shape == (SIZES[0], CLASSES)
    assert torch.equal(algorithm.predict(algorithm.network.normalize(images)), logits)


def test_documented() -> None:
    for name in algorithm_names():
        doc = inspect.getdoc(type(build(name)))
        assert doc
        assert "\\(" in doc
        if name not in ("ERM",):
            assert "DomainBed" in doc, f"{name} does not say where it departs from DomainBed"
