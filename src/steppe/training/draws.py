"""Random hyper-parameters of a run, seeded as DomainBed seeds them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from steppe.algorithms import algorithm_spec
from steppe.domains import DatasetSpec, seed_hash
from steppe.optim import search_space
from steppe.options import Like, Option
from steppe.search import Distribution, Hyperparameter, LogUniform, run_space

_SEED_NAMES = {"dropout": "resnet_dropout"}
"""Names under which DomainBed seeds a draw, where they are not ours."""


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
    """Draw what a search varies: batch size, dropout, the options of optimizer and algorithm.

    Each name has a generator of its own, seeded by (hparams_seed, trial_seed, name), so that a new
    name leaves the draws of the others alone; seed 0 gives the defaults.

    Args:
        dataset: its record.
        optimizer: a name.
        space: a name.
        hparams_seed: DomainBed's.
        trial_seed: of the split.
        algorithm: a name.
        pretrained: whether the network is fine-tuned (default: as the dataset has it).

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
    low, high = dataset.batch_exponents
    run["batch_size"] = Hyperparameter(
        dataset.batch_size, LogUniform(low, high, base=2.0, integer=True)
    )
    if dataset.pretrained:
        run |= spec.run
    own = search_space(optimizer, space, pretrained)

    def draw(name: str, default: float | int | None, distribution: Distribution) -> Any:
        if hparams_seed == 0:
            return default
        return _sample(distribution, seed_hash(seed_hash(hparams_seed, trial_seed), name))

    def draw_all(hypers: Mapping[str, Hyperparameter], names: Mapping[str, str]) -> dict[str, Any]:
        return {
            name: draw(names.get(name, name), hyper.default, hyper.distribution)
            for name, hyper in hypers.items()
        }

    def searched(option: Option) -> Distribution:
        like = option.distribution
        return own[like.option].distribution if isinstance(like, Like) else like

    return {
        **draw_all(run, _SEED_NAMES),
        "optimizer": {"name": optimizer, **draw_all(own, spec.drawn_as)},
        "algorithm": {
            "name": spec.name,
            **{
                name: draw(option.drawn_as or name, option.default, searched(option))
                for name, option in spec.options.items()
            },
        },
    }


@lru_cache(maxsize=2**16)  # of a sweep, the same for every target
def _sample(distribution: Distribution, seed: int) -> float | int:
    return distribution.sample(np.random.RandomState(seed))
