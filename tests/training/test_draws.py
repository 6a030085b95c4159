"""Random hyperparameters: DomainBed's golden values, and that no name disturbs another."""

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
    config = configure({"dataset": "vlcs", "targets": "SUN09"}, draw=1, space="domainbed")
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


# As DomainBed's registry words them (Fishr's as its repository does): the name that seeds a draw,
# the default and the rule.
ALGORITHMS = {
    "IRM": {
        "penalty": ("irm_lambda", 1e2, lambda r: 10 ** r.uniform(-1, 5)),
        "anneal_steps": ("irm_penalty_anneal_iters", 500, lambda r: int(10 ** r.uniform(0, 4))),
    },
    "VREx": {
        "penalty": ("vrex_lambda", 1e1, lambda r: 10 ** r.uniform(-1, 5)),
        "anneal_steps": ("vrex_penalty_anneal_iters", 500, lambda r: int(10 ** r.uniform(0, 4))),
    },
    "GroupDRO": {"eta": ("groupdro_eta", 1e-2, lambda r: 10 ** r.uniform(-3, -1))},
    "Mixup": {"alpha": ("mixup_alpha", 0.2, lambda r: 10 ** r.uniform(-1, 1))},
    "MLDG": {
        "beta": ("mldg_beta", 1.0, lambda r: 10 ** r.uniform(-1, 1)),
        "n_meta_test": ("n_meta_test", 2, lambda r: r.choice([1, 2])),
    },
    "MMD": {"penalty": ("mmd_gamma", 1.0, lambda r: 10 ** r.uniform(-1, 1))},
    "CORAL": {"penalty": ("mmd_gamma", 1.0, lambda r: 10 ** r.uniform(-1, 1))},
    "DANN": {
        "penalty": ("lambda", 1.0, lambda r: 10 ** r.uniform(-2, 2)),
        "d_steps": ("d_steps_per_g_step", 1, lambda r: int(2 ** r.uniform(0, 3))),
        "grad_penalty": ("grad_penalty", 0.0, lambda r: 10 ** r.uniform(-2, 1)),
        "beta1": ("beta1", 0.5, lambda r: r.choice([0.0, 0.5])),
        "width": ("mlp_width", 256, lambda r: int(2 ** r.uniform(6, 10))),
        "depth": ("mlp_depth", 3, lambda r: int(r.choice([3, 4, 5]))),
        "dropout": ("mlp_dropout", 0.0, lambda r: r.choice([0.0, 0.1, 0.5])),
        "lr": ("lr_d", None, lambda r: 10 ** r.uniform(-5, -3.5)),
        "weight_decay": ("weight_decay_d", None, lambda r: 10 ** r.uniform(-6, -2)),
    },
    "MTL": {"ema": ("mtl_ema", 0.99, lambda r: r.choice([0.5, 0.9, 0.99, 1.0]))},
    "SagNet": {"penalty": ("sag_w_adv", 0.1, lambda r: 10 ** r.uniform(-2, 1))},
    "RSC": {
        "feature_drop": ("rsc_f_drop_factor", 1 / 3, lambda r: r.uniform(0, 0.5)),
        "batch_drop": ("rsc_b_drop_factor", 1 / 3, lambda r: r.uniform(0, 0.5)),
    },
    "Fishr": {
        "penalty": ("lambda", 1000.0, lambda r: 10 ** r.uniform(1, 4)),
        "anneal_steps": ("penalty_anneal_iters", 1500, lambda r: int(r.uniform(0, 5000))),
        "ema": ("ema", 0.95, lambda r: r.uniform(0.9, 0.99)),
    },
    "CausIRL-CORAL": {"penalty": ("mmd_gamma", 1.0, lambda r: 10 ** r.uniform(-1, 1))},
    "CausIRL-MMD": {"penalty": ("mmd_gamma", 1.0, lambda r: 10 ** r.uniform(-1, 1))},
    "EQRM": {
        "quantile": ("eqrm_quantile", 0.75, lambda r: r.uniform(0.5, 0.99)),
        "burn_in_steps": ("eqrm_burnin_iters", 2500, lambda r: int(10 ** r.uniform(2.5, 3.5))),
    },
    "IB-ERM": {
        "penalty": ("ib_lambda", 1e2, lambda r: 10 ** r.uniform(-1, 5)),
        "anneal_steps": ("ib_penalty_anneal_iters", 500, lambda r: int(10 ** r.uniform(0, 4))),
    },
    "IB-IRM": {
        "penalty": ("irm_lambda", 1e2, lambda r: 10 ** r.uniform(-1, 5)),
        "anneal_steps": ("irm_penalty_anneal_iters", 500, lambda r: int(10 ** r.uniform(0, 4))),
        "ib_penalty": ("ib_lambda", 1e2, lambda r: 10 ** r.uniform(-1, 5)),
        "ib_anneal_steps": ("ib_penalty_anneal_iters", 500, lambda r: int(10 ** r.uniform(0, 4))),
    },
    "IGA": {"penalty": ("penalty", 1000, lambda r: 10 ** r.uniform(1, 5))},
    "RDM": {
        "penalty": ("rdm_lambda", 5.0, lambda r: r.uniform(1.0, 10.0)),
        "variance": ("variance_weight", 0.004, lambda r: r.uniform(0.001, 0.007)),
        "anneal_steps": ("rdm_penalty_anneal_iters", 1500, lambda r: int(r.uniform(800, 2700))),
    },
    "SD": {"penalty": ("sd_reg", 0.1, lambda r: 10 ** r.uniform(-5, -1))},
    "ANDMask": {"tau": ("tau", 1.0, lambda r: r.uniform(0.5, 1))},
    "SANDMask": {
        "tau": ("tau", 0.5, lambda r: r.uniform(0, 1)),  # not its 1.0, which masks everything
        "k": ("k", 10.0, lambda r: 10 ** r.uniform(-3, 5)),
    },
    "CAD": {
        "penalty": ("lmbda", 0.1, lambda r: r.choice([1e-4, 1e-3, 1e-2, 1e-1, 1, 1e1, 1e2])),
        "temperature": ("temperature", 0.1, lambda r: r.choice([0.05, 0.1])),
    },
    "CondCAD": {
        "penalty": ("lmbda", 0.1, lambda r: r.choice([1e-4, 1e-3, 1e-2, 1e-1, 1, 1e1, 1e2])),
        "temperature": ("temperature", 0.1, lambda r: r.choice([0.05, 0.1])),
    },
    "ADRMX": {
        "penalty": ("disc_lambda", 0.75, lambda r: r.choice([0.75])),
        "domain_weight": ("dclf_lambda", 1.0, lambda r: r.choice([1.0])),
        "contrast": ("cnt_lambda", 1.0, lambda r: r.choice([1.0])),
        "remix": ("rmxd_lambda", 1.0, lambda r: r.choice([1.0])),
        "d_steps": ("d_steps_per_g_step", 2, lambda r: r.choice([2])),
        "beta1": ("beta1", 0.5, lambda r: r.choice([0.5])),
        "width": ("mlp_width", 256, lambda r: r.choice([256])),
        "depth": ("mlp_depth", 9, lambda r: int(r.choice([8, 9, 10]))),
    },
    "TRM": {
        "penalty": ("cos_lambda", 1e-4, lambda r: 10 ** r.uniform(-5, 0)),
        "anneal_steps": ("iters", 200, lambda r: int(10 ** r.uniform(0, 4))),
        "eta": ("groupdro_eta", 1e-2, lambda r: 10 ** r.uniform(-3, -1)),
    },
    "Transfer": {
        "penalty": ("t_lambda", 1.0, lambda r: 10 ** r.uniform(-2, 1)),
        "delta": ("delta", 2.0, lambda r: r.uniform(0.1, 3.0)),
        "d_steps": ("d_steps_per_g", 10, lambda r: int(r.choice([1, 2, 5]))),
        "inner_lr": ("lr_d", 1e-3, lambda r: 10 ** r.uniform(-4.5, -2.5)),
    },
    "URM": {
        "penalty": ("urm_adv_lambda", 0.1, lambda r: r.uniform(0, 0.2)),
        "depth": ("urm_discriminator_hidden_layers", 1, lambda r: int(r.choice([1, 2, 3]))),
        "lr": ("urm_discriminator_lr", None, lambda r: 10 ** r.uniform(-6, -4.5)),
    },
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_draw_as_in_domainbed(algorithm):
    spec = dataset_spec("PACS")
    default = draw_hparams(spec, "adam", "domainbed", 0, 0, algorithm)["algorithm"]
    for option, (name, expected, rule) in ALGORITHMS[algorithm].items():
        assert default[option] == expected
        for seeds in ((1, 0), (7, 2), (19, 1)):
            drawn = draw_hparams(spec, "adam", "domainbed", *seeds, algorithm)["algorithm"]
            assert drawn[option] == by_definition(name, rule, *seeds)
            assert type(drawn[option]) in (int, float)


@pytest.mark.parametrize(
    ("algorithm", "name", "default", "rule"),
    [
        ("EQRM", "eqrm_lr", 1e-6, lambda r: 10 ** r.uniform(-7, -5)),
        ("RDM", "rdm_lr", 1.5e-5, lambda r: r.uniform(8e-6, 2e-5)),
    ],
)
def test_later_learning_rates_are_domainbeds_at_its_default(algorithm, name, default, rule):
    for seeds in ((0, 0), (1, 0), (7, 2), (19, 1)):
        hparams = draw_hparams(dataset_spec("PACS"), "adam", "domainbed", *seeds, algorithm)
        expected = default if seeds == (0, 0) else by_definition(name, rule, *seeds)
        assert 5e-5 * hparams["algorithm"]["lr_factor"] == pytest.approx(expected, rel=1e-12)


def test_rdm_draws_a_batch_size_of_its_own():
    rule = lambda r: int(r.uniform(70, 100))  # noqa: E731
    for seeds in ((1, 0), (7, 2), (19, 1)):
        drawn = draw_hparams(dataset_spec("PACS"), "adam", "domainbed", *seeds, "RDM")
        assert drawn["batch_size"] == by_definition("batch_size", rule, *seeds)
    config = configure({"dataset": "PACS", "targets": "sketch", "algorithm": "RDM"})
    assert config.batch_size == 88


def test_urms_second_learning_rate_is_scaled_for_small_images_too():
    drawn = draw_hparams(dataset_spec("RotatedMNIST"), "adam", "domainbed", 3, 1, "URM")
    rate = by_definition("urm_discriminator_lr", lambda r: 10 ** r.uniform(-5.5, -3.5), 3, 1)
    assert drawn["algorithm"]["lr"] == rate


def test_an_algorithm_changes_only_what_is_its_own():
    spec = dataset_spec("PACS")
    erm, coral, dann, arm = (
        draw_hparams(spec, "adam", "domainbed", 3, 1, name)
        for name in ("ERM", "CORAL", "DANN", "ARM")
    )
    assert {**coral, "algorithm": 0} == {**erm, "algorithm": 0}
    assert arm["batch_size"] == 8
    assert dann["batch_size"] == erm["batch_size"]
    assert dann["optimizer"]["lr"] == by_definition(
        "lr_g", lambda r: 10 ** r.uniform(-5, -3.5), 3, 1
    )
    small = draw_hparams(dataset_spec("RotatedMNIST"), "adam", "domainbed", 3, 1, "ARM")
    assert small["batch_size"] != 8
    config = configure({"dataset": "PACS", "targets": "sketch", "algorithm": "DANN"}, draw=3)
    assert config.algorithm.options == {
        key: value
        for key, value in draw_hparams(spec, "adam", "domainbed", 3, 0, "DANN")["algorithm"].items()
        if key != "name"
    }
