"""Tables of tasks whose truth is known."""

from __future__ import annotations

import numpy as np

from steppe.study.advice.table import Example

NAMES = ("adamw", "sgd", "sam", "fad", "gam")


def table(
    effect: float,
    seed: int,
    families: int = 11,
    relatives: int = 4,
    indicators: int = 8,
    noise: float = 0.7,
    spread: float = 1.0,
    seeds: int = 10,
    names: tuple[str, ...] = NAMES,
) -> list[Example]:
    """Families whose first indicator decides between the optimizers, or none with effect 0.

    `spread` is what indicators do not explain, half of its variance shared by relatives; `noise`
    is that of a seed, half of its variance shared by optimizers.
    """
    rng = np.random.default_rng(seed)
    slopes = effect * np.linspace(-1, 1, len(names))
    found = []
    for family in range(families):
        x_family, y_family = rng.normal(size=indicators), rng.normal(size=len(names))
        for relative in range(relatives):
            x = np.sqrt(0.7) * x_family + np.sqrt(0.3) * rng.normal(size=indicators)
            e = np.sqrt(0.5) * y_family + np.sqrt(0.5) * rng.normal(size=len(names))
            mean = 60 + x[0] * slopes + spread * e
            shared = rng.normal(size=(1, seeds))
            own = rng.normal(size=(len(names), seeds))
            scores = mean[:, None] + noise * np.sqrt(0.5) * (shared + own)
            found.append(
                Example(
                    task=f"family{family}-{relative}",
                    family=f"family{family}",
                    base=f"base{family % 5}",
                    indicators={f"x{i}": float(value) for i, value in enumerate(x)},
                    scores={
                        n: tuple(np.clip(row, 0, 100).tolist())
                        for n, row in zip(names, scores, strict=True)
                    },
                )
            )
    return found
