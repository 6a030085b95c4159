"""Every algorithm: its options, what it refuses, and the contract that optimizers rely on."""

import copy
import inspect
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from steppe.algorithms import (
    ERM,
    Algorithm,
    AlgorithmSpec,
    algorithm_names,
    algorithm_spec,
    build_algorithm,
    register_algorithm,
)
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training.backbones import build_network
from tests.algorithms.oracles import move

SPECS = [algorithm_spec(name) for name in algorithm_names()]
MATCHING = {"penalty": "1.0 | 10^U(-1, 1)"}
ADVERSARIAL = {
    "penalty": "1.0 | 10^U(-2, 2)",
    "d_steps": "1 | int 2^U(0, 3)",
    "grad_penalty": "0.0 | 10^U(-2, 1)",
    "beta1": "0.5 | {0.0, 0.5}",
    "width": "256 | int 2^U(6, 10)",
    "depth": "3 | {3, 4, 5}",
    "dropout": "0.0 | {0.0, 0.1, 0.5}",
    "lr": "None | None",
    "weight_decay": "None | 10^U(-6, -2)",
}
PROTOCOL = {
    "ERM": {},
    "IRM": {"penalty": "100.0 | 10^U(-1, 5)", "anneal_steps": "500 | int 10^U(0, 4)"},
    "VREx": {"penalty": "10.0 | 10^U(-1, 5)", "anneal_steps": "500 | int 10^U(0, 4)"},
    "GroupDRO": {"eta": "0.01 | 10^U(-3, -1)"},
    "Mixup": {"alpha": "0.2 | 10^U(-1, 1)"},
    "MLDG": {
        "beta": "1.0 | 10^U(-1, 1)",
        "n_meta_test": "2 | {1, 2}",
        "inner_lr": "0.01 | 0.01",
    },
    "MMD": MATCHING,
    "CORAL": MATCHING,
    "DANN": ADVERSARIAL,
    "CDANN": ADVERSARIAL,
    "MTL": {"ema": "0.99 | {0.5, 0.9, 0.99, 1.0}"},
    "SagNet": {"penalty": "0.1 | 10^U(-2, 1)"},
    "ARM": {"support": "8 | 8"},
    "RSC": dict.fromkeys(("feature_drop", "batch_drop"), f"{1 / 3} | U(0, 0.5)"),
    "MixStyle": {"p": "0.5 | 0.5", "alpha": "0.1 | 0.1"},
    "MIRO": {"penalty": "0.1 | {0.01, 0.1, 1.0}", "lr_factor": "10.0 | 10.0"},
    "Fishr": {
        "penalty": "1000.0 | 10^U(1, 4)",
        "anneal_steps": "1500 | int U(0, 5000)",
        "ema": "0.95 | U(0.9, 0.99)",
    },
}
"""Every option's default and search distribution, as DomainBed has them where it has them."""

specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def batches(size: int, n_domains: int = 3) -> list[Batch]:
    rng = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randint(256, (size, 3, 8, 8), dtype=torch.uint8, generator=rng),
            torch.randint(5, (size,), generator=rng),
        )
        for _ in range(n_domains)
    ]


def build(spec: AlgorithmSpec, n_domains: int = 3, **options: object) -> Algorithm:
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=5, image_size=8, dropout=0.25)
    return build_algorithm(spec.name, network, n_domains, **options)


def test_the_options_are_the_protocols():
    found = {
        spec.name: {k: f"{o.default} | {o.distribution}" for k, o in spec.options.items()}
        for spec in SPECS
    }
    assert found == PROTOCOL


@specs
def test_the_options_are_the_classes_arguments(spec: AlgorithmSpec):
    target: type = spec.target
    while "options" in inspect.signature(target).parameters:  # which it hands on
        (target,) = target.__bases__
    _, _, *arguments = inspect.signature(target).parameters.values()
    assert {argument.name: argument.default for argument in arguments} == spec.defaults


@specs
def test_a_search_draws_what_is_allowed(spec: AlgorithmSpec):
    for name, option in spec.options.items():
        option.check(name, option.default)
        if option.distribution is None or option.default is None:
            assert option.default is None
        elif name != "grad_penalty":  # off by default, never off in a search: as in DomainBed
            assert option.distribution.contains(option.default)
        rng = np.random.RandomState(0)
        for _ in range(50 if option.distribution else 0):
            option.check(name, option.distribution.sample(rng))


@specs
def test_bad_options_are_refused(spec: AlgorithmSpec):
    for name, option in spec.options.items():
        whole = isinstance(option.default, int)
        bad = ["1", True, math.nan, option.low - 1]
        bad += [] if math.isinf(option.high) else [option.high + 1]
        bad += [None] * (option.default is not None) + [1.5] * whole
        for value in bad:
            with pytest.raises(UserError) as refusal:
                build(spec, **{name: value})
            message = f"algorithm '{spec.name}': {name}={value!r}: expected "
            assert str(refusal.value).startswith(message + "a whole" if whole else message)
            assert f"at least {option.low:g}" in str(refusal.value)
    with pytest.raises(UserError, match=f"unknown option for algorithm '{spec.name}': 'rho'"):
        build(spec, rho=0.05)


def test_infinity_is_refused():
    for spec in SPECS:
        for name in spec.options:
            with pytest.raises(UserError, match=f"algorithm '{spec.name}': {name}=inf: expected"):
                spec.check({name: math.inf})


def test_a_near_miss_is_told_the_options_name():
    with pytest.raises(UserError, match="'penalti', did you mean 'penalty'"):
        build(algorithm_spec("IRM"), penalti=1.0)


@specs
def test_too_few_domains_or_images_are_refused(spec: AlgorithmSpec):
    if spec.min_domains > 1:
        message = f"'{spec.name}' .* at least {spec.min_domains} source .* add a --source"
        with pytest.raises(UserError, match=message):
            build(spec, spec.min_domains - 1)
    spec.check_batch(spec.min_batch)
    with pytest.raises(UserError, match=f"'{spec.name}' needs at least .*: raise batch_size"):
        spec.check_batch(spec.min_batch - 1)


@specs
def test_the_fewest_domains_and_images_are_enough(spec: AlgorithmSpec):
    algorithm = build(spec, spec.min_domains, **{"n_meta_test": 1} if spec.name == "MLDG" else {})
    prepared = algorithm.prepare(batches(spec.min_batch, spec.min_domains))
    for objective in algorithm.objectives():
        total = algorithm(prepared, objective.name).total
        gradients = torch.autograd.grad(total, objective.parameters, materialize_grads=True)
        assert all(value.isfinite().all() for value in (total, *gradients))


def snapshot(algorithm: Algorithm, prepared: object) -> tuple[object, ...]:
    """Everything that a pass may not change: the step, the state, the modes, the generators."""
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    modes = [module.training for module in algorithm.modules()]
    return copy.deepcopy((vars(prepared), dict(algorithm.state_dict()), modes, generators))


def norms(algorithm: Algorithm) -> list[str]:
    """Buffers of batch norms that learn: the optimizers put them back."""
    named = algorithm.named_modules()
    learning = [n for n, m in named if isinstance(m, nn.BatchNorm2d) and m.training]
    return [name for name in algorithm.state_dict() if name.rpartition(".")[0] in learning]


@specs
def test_passes_are_pure(spec: AlgorithmSpec):
    algorithm = build(spec)
    prepared = algorithm.prepare(batches(4))
    torch.testing.assert_close(prepared.keep.unique(), torch.tensor([0, 4 / 3]))
    assert 0.9 < prepared.keep.mean() < 1.1
    assert prepared.keep.shape == (12, algorithm.network.n_features)
    before = snapshot(algorithm, prepared)
    for objective in algorithm.objectives():
        first = algorithm(prepared, objective.name)
        for _ in range(3):
            again = algorithm(prepared, objective.name, first.aux)
            assert torch.equal(again.total, first.total)
        learned = {name: algorithm.state_dict()[name] for name in norms(algorithm)}
        before[1].update(copy.deepcopy(learned))
        torch.testing.assert_close(snapshot(algorithm, prepared), before, rtol=0, atol=0)
        # Pure in the parameters, not deaf to them.
        moved = copy.deepcopy(algorithm)
        move(moved, seed=0)
        assert not torch.equal(moved(prepared, objective.name).total, first.total)
    assert algorithm.eval().prepare(batches(4)).keep is None


@specs
def test_half_precision_is_near(spec: AlgorithmSpec):
    algorithm = build(spec)
    prepared = algorithm.prepare(batches(4))
    for objective in algorithm.objectives():
        exact = algorithm(prepared, objective.name).total
        with torch.autocast("cpu", torch.bfloat16):
            losses = algorithm(prepared, objective.name)
        losses.total.backward()
        shown = losses.total, *losses.parts.values()
        assert {value.dtype for value in shown} == {torch.float32}
        torch.testing.assert_close(losses.total, exact, rtol=0.05, atol=0.01)


def test_a_known_name_is_refused():
    with pytest.raises(UserError, match="algorithm 'Erm' is known already: choose another name"):
        register_algorithm(AlgorithmSpec(name="Erm", target=ERM, citation=""))
    assert algorithm_names() == tuple(spec.name for spec in SPECS)
