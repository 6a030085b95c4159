"""Random hyper-parameters of a run, seeded as DomainBed seeds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.domains import DatasetSpec, seed_hash
from steppe.optim import run_space, search_space
from steppe.optim.search import Fixed, Hyperparameter, LogUniform

_SEED_NAMES = {"dropout": "resnet_dropout"}
"""Names under which DomainBed seeds a draw, where they are not ours."""

_DOMAINBED_SMALL = {
    "lr": Hyperparameter(1e-3, LogUniform(-4.5, -2.5)),
    "weight_decay": Hyperparameter(0.0, Fixed(0.0)),
}
"""What DomainBed has for its small images, in place of what it has for fine-tuning."""
_NO_DROPOUT = Hyperparameter(0.0, Fixed(0.0))


def draw_hparams(
    dataset: DatasetSpec, optimizer: str, space: str, hparams_seed: int, trial_seed: int
) -> dict[str, Any]:
    """Draw what a search varies: batch size, dropout, and the optimizer's hyper-parameters.

    Each name has a generator of its own, seeded by (hparams_seed, trial_seed, name), so that a new
    name leaves the draws of the others alone; seed 0 gives the defaults.

    Examples:
        >>> from steppe.domains import dataset_spec
        >>> drawn = draw_hparams(dataset_spec("VLCS"), "adam", "domainbed", 1, 0)
        >>> drawn["batch_size"], drawn["optimizer"]["lr"]
        (39, 2.7028930742148706e-05)
    """
    run = run_space(space)
    low, high = dataset.batch_exponents
    run["batch_size"] = Hyperparameter(
        dataset.batch_size, LogUniform(low, high, base=2.0, integer=True)
    )
    own = search_space(optimizer, space)
    if space == "domainbed" and not dataset.pretrained:
        own |= _DOMAINBED_SMALL
        run["dropout"] = _NO_DROPOUT  # its network for them has none

    def draw(name: str, hyper: Hyperparameter) -> float | int:
        if hparams_seed == 0:
            return hyper.default
        name = _SEED_NAMES.get(name, name)
        seed = seed_hash(seed_hash(hparams_seed, trial_seed), name)
        return hyper.distribution.sample(np.random.RandomState(seed))

    return {
        **{name: draw(name, hyper) for name, hyper in run.items()},
        "optimizer": {"name": optimizer, **{n: draw(n, hyper) for n, hyper in own.items()}},
    }
