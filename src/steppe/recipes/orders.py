"""From a recipe at a scale to the grids of a sweep, and the learning rates that are tuned first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from steppe.domains import dataset_spec
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_spec
from steppe.reports import Row, Run
from steppe.reports.selection import best_step
from steppe.sweeps import Grid, jobs, target_sets
from steppe.training import RunConfig

from .catalog import RECIPES
from .recipe import Part, Recipe, Scale

_RATE = "optimizer.lr="
TUNING = "tune"
"""Begins the tags of runs that tune a learning rate."""


class Place(NamedTuple):
    """What a learning rate is chosen for."""

    dataset: str
    targets: str
    method: Row


@dataclass(frozen=True)
class Rate:
    """A learning rate, and what was known when it was chosen.

    Attributes:
        lr: the learning rate.
        validation: by learning rate tried, the accuracy on validation images of the training
            domains, in per cent, or None if the run diverged; empty where none was tried.
    """

    lr: float
    validation: Mapping[float, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """A recipe as it is to be run.

    Attributes:
        recipe: which.
        scale: how much of it.
        datasets: by the names that runs have: a folder's is its path.
        parts: of the recipe, with the optimizers that were asked for.
        overrides: ``key=value`` texts for every run.
        options: keys of every run's config.
    """

    recipe: Recipe
    scale: Scale
    datasets: tuple[str, ...]
    parts: tuple[Part, ...]
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned first."""
        given = any(text.startswith(_RATE) for text in self.overrides)
        several = len(self.scale.factors) > 1
        return self.recipe.tuned and several and not self.scale.draws and not given

    def setting(self, part: Part) -> str:
        """What is special about a part, as it is run here."""
        if part.steps is None:
            return part.label
        steps = self.steps(part, self.datasets[0]) - 1
        return f"{steps:,} steps" + (f", for {part.steps:,}" if steps != part.steps else "")

    def held_out(self, dataset: str) -> list[str]:
        """The targets of a dataset, in turn; domains that are held out together joined by ``+``."""
        spec = dataset_spec(dataset)
        sets = ["+".join(names) for names in target_sets(spec, "single")]
        named = self.recipe.targets.split(",")
        if set(named) <= set(spec.domains):
            sets = named
        return sets[: self.scale.only]

    def steps(self, part: Part, dataset: str) -> int:
        """Updates of a run; as DomainBed counts, one more than the paper says."""
        paper = part.steps or dataset_spec(dataset).steps - 1
        return max(2, round(self.scale.share * paper)) + 1


def make_order(
    name: str,
    scale: str,
    *,
    datasets: Sequence[str] = (),
    optimizers: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Order:
    """A recipe at a scale, with what the user wants otherwise.

    Args:
        name: of the recipe.
        scale: `full`, `small` or `smoke`.
        datasets: names or folders; the scale's, or else the recipe's, unless given.
        optimizers: of the recipe's, or `all`; those of the scale unless given.
        changes: of the scale: `trials`, `draws`, `share`, `factors`.
        overrides: ``key=value`` texts for every run.
        options: keys of every run's config.

    Examples:
        >>> order = make_order("table1", "small")
        >>> order.datasets, order.parts[0].optimizers, order.steps(order.parts[0], "PACS")
        (('PACS',), ('adam', 'sgd', 'sam', 'gam', 'fad'), 1001)
    """
    if name not in RECIPES:
        raise UserError(unknown("recipe", name, RECIPES))
    recipe = RECIPES[name]
    chosen = replace(recipe.at(scale), **dict(changes or {}))
    given = recipe.optimizers if tuple(optimizers) == ("all",) else tuple(optimizers)
    for optimizer in given:
        if optimizer not in recipe.optimizers:
            raise UserError(unknown(f"optimizer of {name}:", optimizer, recipe.optimizers))
    if changes and "factors" in changes:
        _check_tuned(recipe, chosen, overrides)
    wanted = given or chosen.optimizers or recipe.optimizers
    parts = tuple(
        replace(part, optimizers=tuple(o for o in part.optimizers if o in wanted))
        for part in recipe.parts
    )
    named = tuple(datasets) or chosen.datasets[: len(recipe.datasets)] or recipe.datasets
    return Order(
        recipe,
        chosen,
        tuple(dict.fromkeys(dataset_spec(dataset).name for dataset in named)),
        tuple(part for part in parts if part.optimizers),
        tuple(overrides),
        {**chosen.options, **(options or {})},
    )


def _check_tuned(recipe: Recipe, scale: Scale, overrides: Sequence[str]) -> None:
    """Refuses factors that nothing would be multiplied by."""
    given = next((text for text in overrides if text.startswith(_RATE)), None)
    reasons = {
        f"they are drawn ({scale.draws} draws; --draws 0 tunes them)": scale.draws,
        f"{given} is given": given,
        "it tunes none: give one": not recipe.tuned and len(scale.factors) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{recipe.name} cannot try factors of learning rates: {reason}")


def _methods(part: Part) -> Iterator[Row]:
    for algorithm, averaging, optimizer in product(
        part.algorithms, part.averaging, part.optimizers
    ):
        yield Row(algorithm, optimizer, averaging)


def places(order: Order) -> list[Place]:
    """Everything that has a learning rate of its own."""
    found = [
        Place(dataset, targets, method)
        for dataset in order.datasets
        for part in order.parts
        for method in _methods(part)
        for targets in order.held_out(dataset)
    ]
    return list(dict.fromkeys(found))


def _default(method: Row) -> float:
    return float(optimizer_spec(method.optimizer).lr.default)


def rates_tried(order: Order, place: Place) -> list[float]:
    """The learning rates that are tried for a place."""
    factors = order.scale.factors
    if not order.tunes and len(factors) != 1:
        factors = (1.0,)
    return [float(f"{factor * _default(place.method):.3g}") for factor in factors]


def default_rates(order: Order) -> dict[Place, Rate]:
    """Learning rates where none is tuned: the optimizers' own defaults of the space `fair`.

    They are multiplied by the factor, where there is a single one.
    """
    return {place: Rate(rates_tried(order, place)[0]) for place in places(order)}


def first_configs(order: Order) -> list[RunConfig]:
    """The config of a run of each dataset."""
    found = {grid.datasets[0]: grid for grid in reversed(grids(order, default_rates(order)))}
    return [next(jobs(grid))[1] for grid in found.values()]


def tuning_grids(order: Order) -> list[Grid]:
    """The runs that tune learning rates: short ones, of the first trial."""
    first = {part.steps or 0: part for part in reversed(order.parts)}
    part = first[min(first)]  # the shortest runs that the recipe has
    found = []
    for place in places(order) if order.tunes else ():
        steps = max(2, round(order.scale.tuning * (order.steps(part, place.dataset) - 1))) + 1
        found += [
            _grid(order, place, 1, steps, f"{TUNING}{lr:g}", lr) for lr in rates_tried(order, place)
        ]
    return found


def grids(order: Order, rates: Mapping[Place, Rate]) -> list[Grid]:
    """The runs of the recipe itself, as far as their learning rates are known."""
    found = []
    for dataset, part in product(order.datasets, order.parts):
        steps = order.steps(part, dataset)
        for method, targets in product(_methods(part), order.held_out(dataset)):
            place = Place(dataset, targets, method)
            if place in rates:
                lr = None if order.scale.draws else rates[place].lr
                found.append(
                    _grid(order, place, order.scale.trials, steps, part.tag, lr, part.overrides)
                )
    return found


def _grid(
    order: Order,
    place: Place,
    trials: int,
    steps: int,
    tag: str,
    lr: float | None,
    overrides: Sequence[str] = (),
) -> Grid:
    options = {**order.options, "steps": steps}
    if order.scale.evaluations is not None:
        options["checkpoint_every"] = max(1, -(-(steps - 1) // order.scale.evaluations))
    rate = () if lr is None else (f"optimizer.lr={lr:g}",)
    method = place.method
    return Grid(
        (place.dataset,),
        (method.algorithm,),
        (method.optimizer,),
        (method.averaging,),
        trials,
        order.scale.draws if lr is None else 0,
        place.targets,
        order.scale.space,
        (*rate, *overrides, *order.overrides),
        options,
        tag,
    )


def choose_rates(
    order: Order, runs: Iterable[Run], diverged: Iterable[Grid] = ()
) -> dict[Place, Rate]:
    """For every place the learning rate whose run validates best on its own training domains.

    No other run is looked at: what validates another target's runs is, in part, this target. Places
    that not all rates have been tried for are left out, and those where all of them diverged.

    Args:
        order: what is being run.
        runs: those that tune and are finished.
        diverged: of `tuning_grids`, those whose run diverged.
    """
    found: dict[tuple[str, str, Row], dict[float, float | None]] = defaultdict(dict)
    for run in runs:
        chosen = best_step(run)
        if chosen is not None and chosen.validation is not None:
            key = _key(Place(run.dataset, "+".join(run.targets), run.row))
            found[key][float(run.hparams["lr"])] = 100 * chosen.validation
    for grid in diverged:
        method = Row(grid.algorithms[0], grid.optimizers[0], grid.averaging[0])
        found[_key(Place(grid.datasets[0], grid.targets, method))][_rate_of(grid)] = None
    rates = {}
    for place in places(order):
        seen = found.get(_key(place), {})
        if not set(rates_tried(order, place)) <= set(seen):
            continue
        learned = {lr: value for lr, value in seen.items() if value is not None}
        if learned:
            best = max(learned, key=lambda lr: (learned[lr], -lr))
            rates[place] = Rate(best, dict(sorted(seen.items())))
    return rates


def _key(place: Place) -> tuple[str, str, Row]:
    """A place, whatever the order of its targets."""
    return place.dataset, "+".join(sorted(place.targets.split("+"))), place.method


def _rate_of(grid: Grid) -> float:
    """The learning rate that a grid of `tuning_grids` tries."""
    return float(grid.tag.removeprefix(TUNING))
