"""Random hyperparameters of a run, with DomainBed's seeding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from steppe.algorithms import algorithm_spec
from steppe.domains import DatasetSpec, seed_hash
from steppe.optim import search_space
from steppe.options import Like, Option
from steppe.search import Distribution, Fixed, Hyperparameter, LogUniform, run_space

_SEED_NAMES = {"dropout": "resnet_dropout"}
"""DomainBed's names for seeding a draw, where they differ from steppe's."""


def draw_hparams(
    dataset: DatasetSpec,
    optimizer: str,
    space: str,
    hparams_seed: int,
    trial_seed: int,
    algorithm: str = "ERM",
    *,
    pretrained: bool | None = None,
) -> dict[str, Any]:
    """Draw the hyperparameters of a search: batch size, dropout, optimizer and algorithm options.

    Each name has its own generator, seeded by (hparams_seed, trial_seed, name), so adding a name
    does not change the other draws. `hparams_seed=0` gives the defaults. `pretrained` says whether
    the network is fine-tuned (default: the dataset's setting).

    Examples:
        >>> from steppe.domains import dataset_spec
        >>> drawn = draw_hparams(dataset_spec("VLCS"), "adam", "domainbed", 1, 0)
        >>> drawn["batch_size"], drawn["optimizer"]["lr"]
        (39, 2.7028930742148706e-05)
        >>> draw_hparams(dataset_spec("VLCS"), "adam", "domainbed", 0, 0, "CORAL")["algorithm"]
        {'name': 'CORAL', 'penalty': 1.0}
    """
    if pretrained is None:
        pretrained = dataset.pretrained
    spec = algorithm_spec(algorithm)
    run = run_space(space, pretrained)
    if not isinstance(run["batch_size"].distribution, Fixed):
        low, high = dataset.batch_exponents
        run["batch_size"] = Hyperparameter(
            dataset.batch_size, LogUniform(low, high, base=2.0, integer=True)
        )
    if dataset.pretrained:
        run |= spec.run
    own = search_space(optimizer, space, pretrained)

    def draw(hypers: Mapping[str, Hyperparameter | Option], names: Mapping[str, str]) -> Any:
        if hparams_seed == 0:
            return {name: hyper.default for name, hyper in hypers.items()}
        drawn = {}
        for name, hyper in hypers.items():
            found = hyper.distribution
            if isinstance(found, Like):
                like, factor = own[found.option], found.factor
                found = (like if factor == 1 else like.scaled(factor)).distribution
            drawn[name] = _sample(found, hparams_seed, trial_seed, names.get(name, name))
        return drawn

    seeded_as = {name: option.drawn_as or name for name, option in spec.options.items()}
    return {
        **draw(run, _SEED_NAMES),
        "optimizer": {"name": optimizer, **draw(own, spec.drawn_as)},
        "algorithm": {"name": spec.name, **draw(spec.options, seeded_as)},
    }


@lru_cache(maxsize=2**16)  # a sweep repeats its draws for every target
def _sample(distribution: Distribution, hparams_seed: int, trial_seed: int, name: str) -> Any:
    seed = seed_hash(seed_hash(hparams_seed, trial_seed), name)
    return distribution.sample(np.random.RandomState(seed))
