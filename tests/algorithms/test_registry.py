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
CONTRASTIVE = {
    "penalty": "0.1 | {0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0}",
    "temperature": "0.1 | {0.05, 0.1}",
}
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
    "CausIRL-CORAL": MATCHING,
    "CausIRL-MMD": MATCHING,
    "EQRM": {
        "quantile": "0.75 | U(0.5, 0.99)",
        "burn_in_steps": "2500 | int 10^U(2.5, 3.5)",
        "lr_factor": "0.02 | 10^U(-2.69897, -0.69897)",
    },
    "IB-ERM": {"penalty": "100.0 | 10^U(-1, 5)", "anneal_steps": "500 | int 10^U(0, 4)"},
    "IB-IRM": {
        "penalty": "100.0 | 10^U(-1, 5)",
        "anneal_steps": "500 | int 10^U(0, 4)",
        "ib_penalty": "100.0 | 10^U(-1, 5)",
        "ib_anneal_steps": "500 | int 10^U(0, 4)",
    },
    "IGA": {"penalty": "1000.0 | 10^U(1, 5)"},
    "RDM": {
        "penalty": "5.0 | U(1, 10)",
        "variance": "0.004 | U(0.001, 0.007)",
        "anneal_steps": "1500 | int U(800, 2700)",
        "lr_factor": "0.3 | U(0.16, 0.4)",
    },
    "SD": {"penalty": "0.1 | 10^U(-5, -1)"},
    "Fish": {"inner_lr": "0.01 | 10^U(-3, -1)"},
    "SelfReg": {
        "logit_penalty": "1.0 | 1.0",
        "feature_penalty": "0.3 | 0.3",
        "alpha": "0.5 | 0.5",
    },
    "ANDMask": {"tau": "1.0 | U(0.5, 1)"},
    "SANDMask": {"tau": "0.5 | U(0, 1)", "k": "10.0 | 10^U(-3, 5)"},
    "CAD": CONTRASTIVE,
    "CondCAD": CONTRASTIVE,
    "ADRMX": {
        "penalty": "0.75 | 0.75",
        "domain_weight": "1.0 | 1.0",
        "contrast": "1.0 | 1.0",
        "remix": "1.0 | 1.0",
        "d_steps": "2 | 2",
        "beta1": "0.5 | 0.5",
        "width": "256 | 256",
        "depth": "9 | {8, 9, 10}",
    },
    "TRM": {
        "penalty": "0.0001 | 10^U(-5, 0)",
        "anneal_steps": "200 | int 10^U(0, 4)",
        "eta": "0.01 | 10^U(-3, -1)",
        "inner_lr": "0.1 | 0.1",
    },
    "Transfer": {
        "penalty": "1.0 | 10^U(-2, 1)",
        "delta": "2.0 | U(0.1, 3)",
        "d_steps": "10 | {1, 2, 5}",
        "inner_lr": "0.001 | 10^U(-4.5, -2.5)",
    },
    "URM": {
        "penalty": "0.1 | U(0, 0.2)",
        "depth": "1 | {1, 2, 3}",
        "lr": "None | 0.1 times the optimizer's `lr`",
    },
    "DMG": {"penalty": "0.1 | 10^U(-2, 1)", "stages": "0 | 0"},
    "pAdaIN": {"p": "0.01 | 10^U(-3, -1)"},
    "EISNet": {
        "jigsaw": "0.7 | 10^U(-1.5, 0.5)",
        "triplet": "0.5 | 10^U(-2, 0)",
        "in_order": "0.9 | 0.9",
        "gray": "0.1 | 0.1",
        "margin": "2.0 | 2.0",
        "negatives": "256 | 256",
        "queue": "1024 | 1024",
        "ema": "0.999 | 0.999",
    },
    "DSON": {"lr_factor": "1.0 | {1.0, 10.0}"},
    "ER": {
        "lambda_c": "0.05 | 10^U(-2, 0)",
        "lambda_d": "0.1 | 10^U(-2, 1)",
        "lambda_e": "0.001 | 10^U(-4, -2)",
        "lr_factor": "0.1 | 0.1",
        "width": "1024 | 1024",
    },
    "MASF": {
        "beta_global": "1.0 | 10^U(-1, 1)",
        "beta_local": "0.005 | 10^U(-4, -1)",
        "margin": "10.0 | {5.0, 10.0, 20.0}",
        "inner_lr": "1e-05 | 1e-05",
    },
    "MetaReg": {
        "share": "0.5 | 0.5",
        "inner_steps": "20 | {5, 20}",
        "inner_lr": "0.001 | 10^U(-4, -2)",
        "lr_factor": "0.001 | 0.001",
    },
    "CLIPood": {"margin": "0.3 | U(0, 0.6)"},
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
    "EQRM.quantile": (1e-6, 0.999999),
    "SelfReg.alpha": (0.05, math.inf),
    "ANDMask.tau": (0, 1),
    "SANDMask.tau": _BELOW_1,  # at 1, the mask is 0 everywhere
    "CAD.temperature": (0.001, math.inf),
    "CondCAD.temperature": (0.001, math.inf),
    "ADRMX.d_steps": (1, math.inf),
    "ADRMX.beta1": _BELOW_1,
    "ADRMX.width": (1, math.inf),
    "ADRMX.depth": (2, math.inf),
    "Transfer.d_steps": (1, math.inf),
    "pAdaIN.p": (0, 1),
    "EISNet.in_order": (0, 1),
    "EISNet.gray": (0, 1),
    "EISNet.negatives": (1, math.inf),
    "EISNet.queue": (1, math.inf),
    "EISNet.ema": (0, 1),
    "ER.width": (4, math.inf),
    "MetaReg.share": _BELOW_1,
    "MetaReg.inner_steps": (1, math.inf),
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
        # Off by default, never off in a search; more by default than in a search: as in DomainBed.
        if (spec.name, name) != ("Transfer", "d_steps") and name != "grad_penalty":
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
