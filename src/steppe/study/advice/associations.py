"""Which single indicators go with the advantage of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import stats

from steppe.errors import UserError, unknown
from steppe.reports.holm import holm

from .extent import BASELINE
from .table import Example, check

PERMUTATIONS = 4999
_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_Codes = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Association:
    """Spearman's correlation over tasks, and its p value before and after Holm's correction."""

    indicator: str
    rho: float
    p: float
    adjusted: float


def associations(
    examples: Sequence[Example],
    optimizer: str,
    baseline: str = BASELINE,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> tuple[Association, ...]:
    """Every indicator against the score of an optimizer less that of the baseline.

    The p values come from permuting whole families: relatives keep their order, so give the
    examples of all families in the same order. Families are only exchanged with families of the
    same size. An indicator that depends on the place in a family alone, such as the number of
    images of a variant, is unchanged by every permutation: its p value is 1 whatever its
    correlation. The correction covers the indicators of this table.
    """
    check(examples, "the table of tasks")
    for name in (optimizer, baseline):
        if name not in examples[0].scores:
            raise UserError(unknown("optimizer", name, examples[0].scores))
    gains = [fmean(e.scores[optimizer]) - fmean(e.scores[baseline]) for e in examples]
    y = _ranks(gains)
    orders = block_orders([e.family for e in examples], permutations, seed)
    found = []
    for name in examples[0].indicators:
        x = _ranks([e.indicators[name] for e in examples])
        rho = float(x @ y)
        # Equality up to rounding counts as exceeding.
        extreme = np.abs(x[orders] @ y) >= abs(rho) - 1e-9
        found.append((name, rho, float(1 + extreme.sum()) / (1 + permutations)))
    adjusted = holm([p for _, _, p in found])
    return tuple(
        Association(*row, corrected) for row, corrected in zip(found, adjusted, strict=True)
    )


def block_orders(families: Sequence[str], count: int, seed: int) -> _Codes:
    """Random orders of tasks that exchange families of the same size (orders x tasks)."""
    members: dict[str, list[int]] = {}
    for row, family in enumerate(families):
        members.setdefault(family, []).append(row)
    by_size: dict[int, list[list[int]]] = {}
    for rows in members.values():
        by_size.setdefault(len(rows), []).append(rows)
    rng = np.random.default_rng(seed)
    orders = np.empty((count, len(families)), dtype=np.int64)
    for same in by_size.values():
        blocks = np.array(same)
        for order in orders:
            order[blocks] = rng.permutation(blocks)
    return orders


def _ranks(values: Sequence[float]) -> _Array:
    """Ranks, centered and with length 1, so that products are correlations; 0 for a constant."""
    ranks = stats.rankdata(values)
    centered = ranks - ranks.mean()
    length = float(np.linalg.norm(centered))
    scaled: _Array = centered / length if length > 0 else centered
    return scaled
