"""Every algorithm: its options, and what it refuses."""

import math

import numpy as np
import pytest
import torch

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
from steppe.training import make_config
from steppe.training.backbones import build_network

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
    "lr": "None | as the optimizer's `lr`",
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

_BELOW_1 = (0, 0.999999)
LIMITS = {
    "Mixup.alpha": (0.05, math.inf),  # below, the sampler of Beta(alpha, alpha) underflows
    "MLDG.n_meta_test": (1, math.inf),
    **{
        f"{name}.{option}": limits
        for name in ("DANN", "CDANN")
        for option, limits in {
            "d_steps": (1, math.inf),
            "beta1": _BELOW_1,
            "width": (1, math.inf),
            "depth": (2, math.inf),
            "dropout": _BELOW_1,
        }.items()
    },
    "MTL.ema": (0, 1),
    "ARM.support": (1, math.inf),
    "RSC.feature_drop": (0, 1),
    "RSC.batch_drop": (0, 1),
    "MixStyle.p": (0, 1),
    "MixStyle.alpha": (0.05, math.inf),
    "Fishr.ema": _BELOW_1,
}
"""What options may be, where it is not any number from 0 on."""
DIGITS = {"dataset": "RotatedDigits", "targets": "75"}

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
def test_a_search_draws_what_is_allowed(spec: AlgorithmSpec):
    for name, option in spec.options.items():
        option.check(name, option.default)
        if option.default is None:
            continue
        if name != "grad_penalty":  # off by default, never off in a search: as in DomainBed
            assert option.distribution.contains(option.default)
        rng = np.random.RandomState(0)
        for _ in range(50):
            option.check(name, option.distribution.sample(rng))


@specs
def test_bad_options_are_refused(spec: AlgorithmSpec):
    for name, option in spec.options.items():
        whole = isinstance(option.default, int)
        below = option.low - 1 if whole or not option.low else option.low * 0.99
        bad = ["1", True, math.nan, below]
        bad += [] if math.isinf(option.high) else [option.high * 1.01]
        bad += [None] * (option.default is not None) + [1.5] * whole
        for value in bad:
            with pytest.raises(UserError) as refusal:
                build(spec, **{name: value})
            message = f"algorithm '{spec.name}': {name}={value!r}: expected "
            assert str(refusal.value).startswith(message + "a whole" if whole else message)
            assert f"at least {option.low:g}" in str(refusal.value)
    known = f"unknown option for algorithm '{spec.name}': 'rho'"
    none = f"algorithm '{spec.name}' has no options: remove 'rho'"
    with pytest.raises(UserError, match=known if spec.options else none):
        build(spec, rho=0.05)


@specs
def test_the_ends_of_what_makes_sense_are_accepted(spec: AlgorithmSpec):
    for name, option in spec.options.items():
        kind = int if isinstance(option.default, int) else float
        ends = [option.low] + [option.high] * math.isfinite(option.high)
        for value in ends:
            algorithm = build(spec, **{name: kind(value)})
            prepared = algorithm.prepare(batches(4))
            for objective in algorithm.objectives():
                assert algorithm(prepared, objective.name).total.isfinite()


def test_the_ends_are_those_of_the_formulas():
    found = {
        f"{spec.name}.{name}": (option.low, option.high)
        for spec in SPECS
        for name, option in spec.options.items()
        if (option.low, option.high) != (0, math.inf)
    }
    assert found == LIMITS


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
        sources = ["0", "15", "30"][: spec.min_domains - 1]
        with pytest.raises(UserError, match=message):  # before anything is written
            make_config({**DIGITS, "sources": sources, "algorithm": spec.name})
    make_config({**DIGITS, "sources": ["0", "15"], "algorithm": spec.name})
    spec.check_batch(spec.min_batch)
    with pytest.raises(UserError, match=f"'{spec.name}' needs at least .*: raise batch_size"):
        spec.check_batch(spec.min_batch - 1)


@specs
def test_the_fewest_domains_and_images_are_enough(spec: AlgorithmSpec):
    algorithm = build(spec, spec.min_domains)
    prepared = algorithm.prepare(batches(spec.min_batch, spec.min_domains))
    for objective in algorithm.objectives():
        total = algorithm(prepared, objective.name).total
        gradients = torch.autograd.grad(total, objective.parameters, materialize_grads=True)
        assert all(value.isfinite().all() for value in (total, *gradients))


def test_a_known_name_is_refused():
    with pytest.raises(UserError, match="algorithm 'Erm' already exists: choose another name"):
        register_algorithm("Erm")(type("Mine", (ERM,), {"__module__": "mine"}))
    assert algorithm_names() == tuple(spec.name for spec in SPECS)
