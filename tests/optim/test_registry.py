"""The registry: every name builds, trains, and draws valid hyperparameters from each space."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steppe.errors import UserError
from steppe.optim.registry import (
    build_optimizer,
    optimizer_names,
    optimizer_spec,
    search_space,
)
from steppe.search import Choice, Fixed, Hyperparameter, LogUniform, Uniform, run_space, spaces

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")

NAMES = optimizer_names()
FLATNESS_AWARE = tuple(name for name in NAMES if optimizer_spec(name).base)


class Task:
    """A small regression, and closures that count their calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.x = torch.randn(32, 3)
        self.y = (self.x[:, :1] * self.x[:, 1:2]).sin() + 2
        self.calls = 0.0

    def loss(self) -> Tensor:
        return nn.functional.mse_loss(self.model(self.x), self.y)

    def step(self, optimizer: Any) -> None:
        def closure(name: str = "main") -> Tensor:
            self.calls += 0.5 if name.startswith("domain:") else 1  # a part of the batch
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward(create_graph=optimizer.needs_graph)
            return loss

        optimizer.step(closure)


def built(name: str, task: Task, **options: float) -> Any:
    """By its name, with what a run would tell it."""
    told = {"domains": 2} if "domains" in optimizer_spec(name).keywords else {}
    return build_optimizer(name, task.model.parameters(), task.model, **told, **options)


def seed_hash(*args: Any) -> int:
    return int(hashlib.md5(str(args).encode()).hexdigest(), 16) % 2**31


def test_the_names_and_their_order() -> None:
    """The paper's and their relatives, then the others by name."""
    first = ("adam", "adamw", "sgd", "yogi", "adabelief", "adahessian")
    assert NAMES[:12] == (*first, "sam", "asam", "gam", "gam-exact", "gam-release", "fad")
    assert list(NAMES[12:]) == sorted(NAMES[12:])
    assert {"gsam", "sagm", "disam", "f-sam", "looksam", "msam", "genie"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str) -> None:
    task = Task()
    lr = search_space(name, "fair")["lr"].distribution
    assert isinstance(lr, LogUniform)
    optimizer = built(name, task, lr=lr.high)
    before = task.loss().item()
    for _ in range(100):
        task.step(optimizer)
    assert task.loss().item() < 0.9 * before


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_the_passes_that_the_entry_says(name: str) -> None:
    task = Task()
    spec = optimizer_spec(name)
    optimizer = built(name, task)
    for _ in range(5):
        task.step(optimizer)
    assert task.calls == pytest.approx(5 * spec.passes)


@pytest.mark.parametrize("name", NAMES)
def test_needs_graph_is_on_every_optimizer(name: str) -> None:
    model = Task().model
    optimizer = build_optimizer(name, model.parameters(), model=model)
    assert optimizer.needs_graph is optimizer_spec(name).needs_graph
    assert optimizer.needs_graph is (name in ("adahessian", "gam-exact"))


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_is_built_with_its_tuned_defaults(name: str, pretrained: bool) -> None:
    spec = optimizer_spec(name)
    model = Task().model
    optimizer = build_optimizer(name, model.parameters(), model=model, pretrained=pretrained)
    space = search_space(name, "fair", pretrained)
    for group in optimizer.param_groups:
        for key, hyper in space.items():
            assert (group[key] if key in group else getattr(optimizer, key)) == hyper.default
        for key in ("lr", "weight_decay"):
            assert space[key].distribution.contains(group[key])
        from_scratch = spec.scratch_lr or pytest.approx(20 * spec.lr.default)
        assert group["lr"] == (spec.lr.default if pretrained else from_scratch)
        assert ("momentum" in group) is (name == "sgd" or name in FLATNESS_AWARE)
    assert spec.citation


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_and_domainbeds_defaults_come_by_naming_the_space(name: str) -> None:
    spec = optimizer_spec(name)
    assert spec.defaults("fad").items() >= {"lr": 5e-5, "weight_decay": 1e-4}.items()
    assert spec.defaults("fad", pretrained=False)["lr"] == pytest.approx(1e-3)
    assert spec.defaults("domainbed").items() >= {"lr": 5e-5, "weight_decay": 0.0}.items()


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adabelief", "adahessian", "genie"])
def test_decoupled_decay_moves_a_weight(name: str, pretrained: bool) -> None:
    """At a gradient of zero the decay is all there is, and float32 must be able to show it."""
    weight = torch.nn.Parameter(torch.full((100,), 1.7))
    optimizer = build_optimizer(name, [weight], pretrained=pretrained)
    loss = (weight * 0.0).square().sum()
    loss.backward(create_graph=optimizer.needs_graph)
    optimizer.step()
    group = optimizer.param_groups[0]
    shrunk = 1.7 * (1 - group["lr"] * group["weight_decay"])
    assert weight[0].item() < np.float32(1.7)
    assert weight[0].item() == pytest.approx(shrunk, rel=1e-7)


def test_the_flatness_aware_defaults() -> None:
    method = {
        name: {
            k: v
            for k, v in optimizer_spec(name).defaults().items()
            if k in optimizer_spec(name).options
        }
        for name in FLATNESS_AWARE
    }
    assert method["sam"] == {"rho": 0.05}
    assert method["asam"] == {"rho": 0.5, "eta": 0.01}
    assert method["gam"] == method["gam-exact"] == {"rho": 0.05, "alpha": 0.1}
    assert method["fad"] == {"rho": 0.05, "alpha": 0.5, "beta": 0.5}


@pytest.mark.parametrize("name", FLATNESS_AWARE)
def test_the_flatness_aware_wrap_sgd_and_share_its_groups(name: str) -> None:
    model, options = Task().model, {"lr": 0.1, "momentum": 0.5, "nesterov": True}
    optimizer = build_optimizer(name, model.parameters(), model=model, **options)
    assert isinstance(optimizer.base, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.5, True)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_named_parameters_and_groups(name: str) -> None:
    model = Task().model
    (plain,) = build_optimizer(name, model.parameters(), model=model).param_groups
    (named,) = build_optimizer(name, model.named_parameters(), model=model).param_groups
    assert [id(p) for p in plain["params"]] == [id(p) for p in named["params"]]
    assert named["param_names"] == [n for n, _ in model.named_parameters()]
    first, second = build_optimizer(
        name,
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1:].parameters()}],
        model=model,
        lr=0.1,
    ).param_groups
    assert (first["lr"], second["lr"]) == (0.5, 0.1)


@pytest.mark.parametrize("space", tuple(spaces))
@pytest.mark.parametrize("name", NAMES)
def test_draws_are_in_range_valid_and_repeatable(name: str, space: str) -> None:
    hypers = search_space(name, space)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for seed in range(25):
        drawn = {
            key: hyper.distribution.sample(np.random.RandomState(seed_hash(seed, key)))
            for key, hyper in hypers.items()
        }
        assert all(hypers[key].distribution.contains(value) for key, value in drawn.items())
        assert all(type(value) in (int, float) for value in drawn.values())
        again = {
            key: hyper.distribution.sample(np.random.RandomState(seed_hash(seed, key)))
            for key, hyper in hypers.items()
        }
        assert drawn == again
        build_optimizer(name, model.parameters(), model=model, **drawn)
    defaults = {key: hyper.default for key, hyper in hypers.items()}
    build_optimizer(name, model.parameters(), model=model, **defaults)


def test_draws_are_domainbeds() -> None:
    """The golden draw of DomainBed's published sweep: ERM, VLCS, hparams_seed 1, trial 0."""
    hypers = {**search_space("adam", "domainbed"), **run_space("domainbed")}
    hypers["resnet_dropout"] = hypers.pop("dropout")  # draws are seeded by DomainBed's names
    seed = seed_hash(1, 0)
    drawn = {
        name: hyper.distribution.sample(np.random.RandomState(seed_hash(seed, name)))
        for name, hyper in hypers.items()
    }
    assert drawn == {
        "lr": 2.7028930742148706e-05,
        "weight_decay": 4.4832883881609976e-4,
        "batch_size": 39,
        "resnet_dropout": 0.5,
    }
    assert {name: hyper.default for name, hyper in hypers.items()} == {
        "lr": 5e-5,
        "weight_decay": 0.0,
        "batch_size": 32,
        "resnet_dropout": 0.0,
    }


def test_the_papers_space() -> None:
    space = search_space("fad", "fad")
    assert {name: hyper.distribution for name, hyper in space.items()} == {
        "lr": LogUniform(-5, -3.5),
        "momentum": LogUniform(-1, 0),
        "weight_decay": LogUniform(-6, -3),
        "rho": Choice((0.05, 0.1, 0.2, 0.5, 1.0, 2.0)),
        "alpha": Choice((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
        "beta": Choice((0.01, 0.05, 0.1, 0.2, 0.5, 1.0)),
    }
    assert search_space("gam", "fad")["alpha"].distribution == Choice(
        (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)
    )
    assert run_space("fad")["dropout"].distribution == Fixed(0.0)


@pytest.mark.parametrize("name", NAMES)
def test_method_hyperparameters_do_not_depend_on_the_space(name: str) -> None:
    method = {key: o.hyperparameter for key, o in optimizer_spec(name).options.items()}
    for space in spaces:
        drawn = search_space(name, space)
        assert {key: drawn[key] for key in method} == method


def test_a_draw_covers_its_distribution() -> None:
    rng = np.random.RandomState(0)
    batch = run_space("fad")["batch_size"].distribution
    sizes = [batch.sample(rng) for _ in range(2000)]
    assert (min(sizes), max(sizes)) == (8, 45)  # 2^5.5 is 45.25
    rho = search_space("fad")["rho"].distribution
    assert {rho.sample(rng) for _ in range(200)} == {0.05, 0.1, 0.2, 0.5, 1.0, 2.0}
    assert not LogUniform(-5, -3.5).contains(1e-3)
    assert not batch.contains(8.5)


@pytest.mark.parametrize(
    ("wrong", "right"), [("adm", "adam"), ("FADD", "fad"), ("gamexact", "gam-exact")]
)
def test_an_unknown_optimizer_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean '{right}'.*adam, adamw, sgd"):
        build_optimizer(wrong, [nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError):
        search_space(wrong)


def test_a_hyphen_may_be_typed_as_an_underscore() -> None:
    built = build_optimizer("GAM_exact", [nn.Parameter(torch.ones(1))])
    assert type(built) is type(build_optimizer("gam-exact", [nn.Parameter(torch.ones(1))]))
    assert search_space("gam_exact") == search_space("gam-exact")


def test_an_unknown_space_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'domainbed'"):
        search_space("adam", "domainbad")
    with pytest.raises(ValueError, match="Known: fair, fad, domainbed"):
        run_space("x")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_hyperparameter_gets_a_suggestion(name: str) -> None:
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match=f"{name}.*'weight_deca'.*did you mean 'weight_decay'"):
        build_optimizer(name, params, weight_deca=0.1)
    for never in ("kwargs", "defaults", "base", "hyper"):
        with pytest.raises(UserError):
            build_optimizer(name, params, **{never: 1})


def test_options_that_the_equations_depend_on_are_not_for_the_caller() -> None:
    with pytest.raises(UserError, match="rectify"):
        build_optimizer("adabelief", [nn.Parameter(torch.ones(1))], rectify=True)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ImportError, match=r"pip install 'steppe\[dg\]'"):
        build_optimizer("adabelief", [nn.Parameter(torch.ones(1))])
    build_optimizer("yogi", [nn.Parameter(torch.ones(1))])


def test_names_and_facts_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from steppe.algorithms import algorithm_spec\n"
        "from steppe.averaging import averaging_spec\n"
        "from steppe.optim import optimizer_spec\n"
        "optimizer_spec('fad').space(), algorithm_spec('IRM').options, averaging_spec('sma')\n"
        "sys.exit(bool({'torch', 'numpy', 'pytorch_optimizer'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "source"),
    [("adam", "torch"), ("adabelief", "pytorch_optimizer"), ("yogi", "steppe"), ("fad", "steppe")],
)
def test_the_entry_says_where_an_optimizer_comes_from(name: str, source: str) -> None:
    assert optimizer_spec(name).source == source


@pytest.mark.parametrize("base", ["yogi", "adabelief", "genie"])
def test_peers_serve_as_the_base_of_fad(base: str) -> None:
    from steppe.optim.fad import FAD

    task = Task()
    optimizer = FAD(build_optimizer(base, task.model.parameters(), lr=1e-3), model=task.model)
    before = task.loss().item()
    for _ in range(50):
        task.step(optimizer)
    assert task.loss().item() < before
    assert task.calls == 200


def test_a_radius_must_be_an_option_of_the_method():
    with pytest.raises(ValueError, match="radius 'radius' is not an option"):
        replace(optimizer_spec("fad"), radii=("radius",))


def test_a_learning_rate_must_be_log_uniform():
    """Training from scratch scales it, which other distributions do not support."""
    with pytest.raises(ValueError, match=r"drawn from a LogUniform distribution, got U\(0, 1\)"):
        replace(optimizer_spec("fad"), lr=Hyperparameter(0.1, Uniform(0, 1)))
