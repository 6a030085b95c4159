"""An experiment at a scale: the grids of its sweep, and the learning rates that are tuned first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

from .experiment import EXPERIMENTS, RATE, Arm, Experiment, Scale

TUNING = "tune"
"""Begins the tags of runs that tune a learning rate."""


class Case(NamedTuple):
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
            domains, in percent, or None if the run diverged; empty where none was tried.
    """

    lr: float
    validation: Mapping[float, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """An experiment as it is to be run.

    Attributes:
        experiment: which.
        scale: how much of it.
        datasets: by the names that runs have: a folder's is its path.
        arms: of the experiment, with the optimizers that were asked for.
        overrides: ``key=value`` texts for every run.
        options: keys of every run's config.
    """

    experiment: Experiment
    scale: Scale
    datasets: tuple[str, ...]
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned first."""
        given = any(text.startswith(RATE) for text in self.overrides)
        several = len(self.scale.factors) > 1
        return self.experiment.tuned and several and not self.scale.draws and not given

    def setting(self, arm: Arm) -> str:
        """What is special about an arm, as it is run here."""
        if arm.steps is None:
            return arm.label
        steps = self.steps(arm, self.datasets[0]) - 1
        return f"{steps:,} steps" + (f", for {arm.steps:,}" if steps != arm.steps else "")

    def held_out(self, dataset: str) -> list[str]:
        """The targets of a dataset, in turn; domains that are held out together joined by ``+``."""
        spec = dataset_spec(dataset)
        sets = ["+".join(names) for names in target_sets(spec, "single")]
        named = self.experiment.targets.split(",")
        if set(named) <= set(spec.domains):
            sets = named
        return sets[: self.scale.only]

    def steps(self, arm: Arm, dataset: str) -> int:
        """Updates of a run; as DomainBed counts, one more than the paper says."""
        paper = arm.steps or dataset_spec(dataset).steps - 1
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
    """An experiment at a scale, with what the user wants otherwise.

    Args:
        name: of the experiment.
        scale: `full`, `small` or `smoke`.
        datasets: names or folders (default: the scale's, then the experiment's).
        optimizers: names among the experiment's, or `all` (default: the scale's).
        changes: of the scale: `trials`, `draws`, `share`, `factors`.
        overrides: ``key=value`` texts for every run.
        options: keys of every run's config.

    Examples:
        >>> order = make_order("table1", "small")
        >>> order.datasets, order.arms[0].optimizers, order.steps(order.arms[0], "PACS")
        (('PACS',), ('adam', 'sgd', 'sam', 'gam', 'fad'), 1001)
    """
    experiment = EXPERIMENTS[name]
    chosen = replace(experiment.at(scale), **dict(changes or {}))
    given = experiment.optimizers if tuple(optimizers) == ("all",) else tuple(optimizers)
    for optimizer in given:
        if optimizer not in experiment.optimizers:
            raise UserError(unknown(f"optimizer of {name}:", optimizer, experiment.optimizers))
    if changes and "factors" in changes:
        _check_tuned(experiment, chosen, overrides)
    wanted = given or chosen.optimizers or experiment.optimizers
    arms = tuple(
        replace(arm, optimizers=tuple(o for o in arm.optimizers if o in wanted))
        for arm in experiment.arms
    )
    named = tuple(datasets) or chosen.datasets[: len(experiment.datasets)] or experiment.datasets
    return Order(
        experiment,
        chosen,
        tuple(dict.fromkeys(dataset_spec(dataset).name for dataset in named)),
        tuple(arm for arm in arms if arm.optimizers),
        tuple(overrides),
        {**chosen.options, **(options or {})},
    )


def _check_tuned(experiment: Experiment, scale: Scale, overrides: Sequence[str]) -> None:
    """Refuses factors that nothing would be multiplied by."""
    given = next((text for text in overrides if text.startswith(RATE)), None)
    reasons = {
        f"they are drawn ({scale.draws} draws; --draws 0 tunes them)": scale.draws,
        f"{given} is given": given,
        "it tunes none: give one": not experiment.tuned and len(scale.factors) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{experiment.name} cannot try factors of learning rates: {reason}")


def methods(arm: Arm) -> list[Row]:
    """Those of an arm, in the paper's order."""
    axes = product(arm.algorithms, arm.averaging, arm.optimizers)
    return [Row(algorithm, optimizer, averaging) for algorithm, averaging, optimizer in axes]


def cases(order: Order) -> list[Case]:
    """Everything that a learning rate is chosen for."""
    found = [
        Case(dataset, targets, method)
        for dataset, arm in product(order.datasets, order.arms)
        if not arm.has_rate
        for method, targets in product(methods(arm), order.held_out(dataset))
    ]
    return list(dict.fromkeys(found))


def rates_tried(order: Order, case: Case) -> list[float]:
    """The learning rates that are tried: multiples of the optimizer's default of space `fair`."""
    factors = order.scale.factors
    if not order.tunes and len(factors) != 1:
        factors = (1.0,)
    default = float(optimizer_spec(case.method.optimizer).lr.default)
    return [float(f"{factor * default:.3g}") for factor in factors]


def default_rates(order: Order) -> dict[Case, Rate]:
    """Learning rates where none is tuned: the defaults, times the factor if there is just one."""
    return {case: Rate(rates_tried(order, case)[0]) for case in cases(order)}


def first_configs(order: Order) -> list[RunConfig]:
    """The config of a run of each dataset."""
    found = {grid.datasets[0]: grid for grid in reversed(grids(order, default_rates(order)))}
    return [next(jobs(grid))[1] for grid in found.values()]


def tuning_grids(order: Order) -> list[Grid]:
    """The runs that tune learning rates: short ones, of the first trial."""
    first = {arm.steps or 0: arm for arm in reversed(order.arms)}
    arm = first[min(first)]  # the shortest runs that the experiment has
    found = []
    for case in cases(order) if order.tunes else ():
        steps = max(2, round(order.scale.tuning * (order.steps(arm, case.dataset) - 1))) + 1
        found += [_grid(order, case, steps, lr) for lr in rates_tried(order, case)]
    return found


def grids(order: Order, rates: Mapping[Case, Rate]) -> list[Grid]:
    """The runs of the experiment itself, as far as their learning rates are known."""
    found = []
    for dataset, arm in product(order.datasets, order.arms):
        steps = order.steps(arm, dataset)
        for method, targets in product(methods(arm), order.held_out(dataset)):
            case = Case(dataset, targets, method)
            if case in rates or arm.has_rate:
                lr = None if order.scale.draws or arm.has_rate else rates[case].lr
                found.append(_grid(order, case, steps, lr, arm))
    return found


def _grid(order: Order, case: Case, steps: int, lr: float | None, arm: Arm | None = None) -> Grid:
    """The runs of an arm; without one, the run that tries a learning rate."""
    scale = order.scale
    options = {**order.options, "steps": steps}
    if scale.evaluations is not None:
        options["checkpoint_every"] = max(1, -(-(steps - 1) // scale.evaluations))
    rate = () if lr is None else (f"{RATE}{lr:g}",)
    return Grid(
        datasets=(case.dataset,),
        algorithms=(case.method.algorithm,),
        optimizers=(case.method.optimizer,),
        averaging=(case.method.averaging,),
        trials=scale.trials if arm else 1,
        draws=scale.draws if lr is None else 0,
        targets=case.targets,
        space=scale.space,
        overrides=(*rate, *(arm.overrides if arm else ()), *order.overrides),
        options=options,
        tag=arm.tag if arm else f"{TUNING}{lr:g}",
    )


def choose_rates(
    order: Order, runs: Iterable[Run], diverged: Iterable[Grid] = ()
) -> dict[Case, Rate]:
    """For every case the learning rate whose run validates best on its own training domains.

    No other run is looked at: what validates another target's runs is, in part, this target. Cases
    that not all rates have been tried for are left out, and those where all of them diverged.

    Args:
        order: what is being run.
        runs: those that tune and are finished.
        diverged: of `tuning_grids`, those whose run diverged.
    """
    found: dict[Case, dict[float, float | None]] = defaultdict(dict)
    for run in runs:
        chosen = best_step(run)
        if chosen is not None and chosen.validation is not None:
            case = Case(run.dataset, "+".join(run.targets), run.row)
            found[case][float(run.hparams["lr"])] = 100 * chosen.validation
    for grid in diverged:
        method = Row(grid.algorithms[0], grid.optimizers[0], grid.averaging[0])
        case = Case(grid.datasets[0], grid.targets, method)
        found[case][float(grid.tag.removeprefix(TUNING))] = None
    rates = {}
    for case in cases(order):
        seen = found[case]
        learned = {lr: value for lr, value in seen.items() if value is not None}
        if learned and set(rates_tried(order, case)) <= set(seen):
            best = max(learned, key=lambda lr: (learned[lr], -lr))
            rates[case] = Rate(best, dict(sorted(seen.items())))
    return rates
