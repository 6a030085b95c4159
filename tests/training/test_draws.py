"""Random hyper-parameters: DomainBed's golden values, and that no name disturbs another."""

import numpy as np
import pytest

from steppe.domains import dataset_names, dataset_spec, seed_hash
from steppe.optim import optimizer_names, search_space
from steppe.training import configure, draw_hparams

GOLDEN = {
    "batch_size": 39,
    "lr": 2.7028930742148706e-05,
    "weight_decay": 4.4832883881609976e-4,
    "dropout": 0.5,
}
"""DomainBed's own, of ERM on VLCS with hparams_seed 1 and trial_seed 0."""


def flat(drawn):
    return {**drawn, **drawn["optimizer"]}


def draw(dataset="VLCS", optimizer="adam", space="domainbed", hparams_seed=1, trial_seed=0):
    return flat(draw_hparams(dataset_spec(dataset), optimizer, space, hparams_seed, trial_seed))


def by_definition(name, rule, hparams_seed, trial_seed):
    return rule(np.random.RandomState(seed_hash(seed_hash(hparams_seed, trial_seed), name)))


def test_domainbeds_golden_values():
    drawn = draw()
    assert {name: drawn[name] for name in GOLDEN} == GOLDEN
    assert type(drawn["batch_size"]) is int
    config = configure({"dataset": "vlcs", "targets": "SUN09"}, draw=1)
    assert flat({**config.model_dump(), "optimizer": config.optimizer.options}).items() >= (
        GOLDEN.items()
    )


# As DomainBed's registry words them: images of 224 x 224, and its small ones.
@pytest.mark.parametrize(
    ("dataset", "rules"),
    [
        ("PACS", {"lr": (-5, -3.5), "weight_decay": (-6, -2), "batch_size": (3, 5.5)}),
        ("DomainNet", {"lr": (-5, -3.5), "weight_decay": (-6, -2), "batch_size": (3, 5)}),
        ("RotatedMNIST", {"lr": (-4.5, -2.5), "weight_decay": None, "batch_size": (3, 9)}),
    ],
)
def test_every_dataset_draws_as_domainbed_does(dataset, rules):
    for hparams_seed, trial_seed in ((1, 0), (7, 2), (19, 1)):
        drawn = draw(dataset, hparams_seed=hparams_seed, trial_seed=trial_seed)
        for name, exponents in rules.items():
            base = 2 if name == "batch_size" else 10
            expected = 0.0
            if exponents:
                expected = by_definition(
                    name,
                    lambda r, b=base, e=exponents: b ** r.uniform(*e),
                    hparams_seed,
                    trial_seed,
                )
            assert drawn[name] == (int(expected) if name == "batch_size" else expected)
        dropout = by_definition(
            "resnet_dropout", lambda r: r.choice([0.0, 0.1, 0.5]), hparams_seed, trial_seed
        )
        # Its network for small images has no dropout, whatever is drawn.
        assert drawn["dropout"] == (0.0 if dataset == "RotatedMNIST" else dropout)


@pytest.mark.parametrize("optimizer", optimizer_names())
def test_a_name_of_its_own_leaves_the_others_alone(optimizer):
    drawn = draw(optimizer=optimizer)
    assert {name: drawn[name] for name in GOLDEN} == GOLDEN
    for space in ("fad", "fair"):
        drawn = draw(optimizer=optimizer, space=space)
        for name, hyper in search_space(optimizer, space).items():
            assert hyper.distribution.contains(drawn[name]), (space, name)


@pytest.mark.parametrize("dataset", dataset_names())
def test_seed_0_is_the_defaults_and_other_seeds_differ(dataset):
    spec = dataset_spec(dataset)
    drawn = draw(dataset, hparams_seed=0)
    lr = 5e-5 if spec.pretrained else 1e-3
    expected = {"batch_size": spec.batch_size, "lr": lr, "weight_decay": 0.0, "dropout": 0.0}
    assert drawn.items() >= expected.items()
    seeds = [(h, t) for h in range(1, 4) for t in range(3)]
    rates = {draw(dataset, hparams_seed=h, trial_seed=t)["lr"] for h, t in seeds}
    assert len(rates) == len(seeds)
