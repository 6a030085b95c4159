"""Ways to choose an optimizer for a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steppe.errors import UserError, unknown

from .ranking import fit, relative
from .regret import Choice, Chooser, Strategy
from .table import Example


def always(name: str) -> Strategy:
    """The same optimizer for every task."""

    def strategy(examples: Sequence[Example]) -> Chooser:
        if name not in examples[0].scores:
            raise UserError(unknown("optimizer", name, examples[0].scores))
        return lambda indicators: {name: 1.0}

    return strategy


def random(examples: Sequence[Example]) -> Chooser:
    """Any optimizer with the same probability."""
    names = tuple(examples[0].scores)
    return lambda indicators: dict.fromkeys(names, 1 / len(names))


def average(examples: Sequence[Example]) -> Chooser:
    """The optimizer with the highest mean over the fitted families."""
    by_family: dict[str, list[int]] = {}
    for row, example in enumerate(examples):
        by_family.setdefault(example.family, []).append(row)
    y = relative(examples)
    mean = sum(y[rows].mean(0) for rows in by_family.values())
    choice = _highest(dict(zip(examples[0].scores, mean, strict=True)))
    return lambda indicators: choice


def probes(indicators: Mapping[str, str]) -> Strategy:
    """The optimizer whose short run scored highest.

    Args:
        indicators: the name of the indicator with that score, for each optimizer.
    """

    def strategy(examples: Sequence[Example]) -> Chooser:
        for name, indicator in indicators.items():
            if name not in examples[0].scores:
                raise UserError(unknown("optimizer", name, examples[0].scores))
            if indicator not in examples[0].indicators:
                raise UserError(unknown("indicator", indicator, examples[0].indicators))
        return lambda found: _highest({name: found[key] for name, key in indicators.items()})

    return strategy


def advised(indicators: Sequence[str] | None = None, short_runs: bool = True) -> Strategy:
    """The highest predicted mean. Everything is fitted without the held-out tasks.

    Args:
        indicators: the names to use; None uses all.
        short_runs: as in `fit`.
    """

    def strategy(examples: Sequence[Example]) -> Chooser:
        first = next(iter(examples[0].scores))
        ranking = fit(examples, indicators, baseline=first, short_runs=short_runs)
        return lambda found: _highest(ranking.predict(found).mean)

    return strategy


def strategies(
    examples: Sequence[Example], probed: Mapping[str, str] | None = None
) -> dict[str, Strategy]:
    """All strategies by name.

    Args:
        examples: the tasks, whose optimizers "always:NAME" is made for.
        probed: for each optimizer, the indicator that is the score of a short run.
    """
    found = {f"always:{name}": always(name) for name in examples[0].scores}
    found |= {"random": random, "average": average, "advised": advised()}
    return found | ({"probes": probes(probed)} if probed else {})


def _highest(values: Mapping[str, float]) -> Choice:
    return {max(values, key=values.__getitem__): 1.0}
