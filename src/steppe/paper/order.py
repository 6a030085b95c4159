"""An experiment at a scale: the grids of its sweep, and its tuned learning rates."""

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
"""Prefix of the tags of tuning runs."""


class Case(NamedTuple):
    """A combination for which a learning rate is selected."""

    dataset: str
    targets: str
    method: Row


@dataclass(frozen=True)
class Rate:
    """A selected learning rate.

    Attributes:
        lr: the learning rate.
        validation: training-domain validation accuracy in percent for each learning rate tried,
            or None if the run diverged; empty if none was tried.
    """

    lr: float
    validation: Mapping[float, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """An experiment with its scale and the user's changes.

    Attributes:
        experiment: the experiment.
        scale: how much of it to run.
        datasets: names as in the runs' configs; a folder's name is its path.
        arms: the experiment's arms, with the requested optimizers only.
        overrides: ``key=value`` settings for every run.
        options: config keys for every run.
    """

    experiment: Experiment
    scale: Scale
    datasets: tuple[str, ...]
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned before the runs."""
        given = any(text.startswith(RATE) for text in self.overrides)
        several = len(self.scale.factors) > 1
        return self.experiment.tuned and several and not self.scale.draws and not given

    def setting(self, arm: Arm) -> str:
        """The setting that distinguishes an arm, with the number of updates it runs here."""
        if arm.steps is None:
            return arm.label
        steps = self.steps(arm, self.datasets[0]) - 1
        return f"{steps:,} steps" + (f", for {arm.steps:,}" if steps != arm.steps else "")

    def held_out(self, dataset: str) -> list[str]:
        """The target sets of a dataset; domains of one set are joined by ``+``."""
        spec = dataset_spec(dataset)
        sets = ["+".join(names) for names in target_sets(spec, "single")]
        named = self.experiment.targets.split(",")
        if set(named) <= set(spec.domains):
            sets = named
        return sets[: self.scale.only]

    def steps(self, arm: Arm, dataset: str) -> int:
        """Number of updates of a run; in DomainBed's counting, one more than in the paper."""
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
    """Combine an experiment, a scale and the user's changes.

    Args:
        name: name of the experiment.
        scale: `full`, `small` or `smoke`.
        datasets: names or folders (default: the scale's, then the experiment's).
        optimizers: some of the experiment's optimizers, or `all` (default: the scale's).
        changes: new values for the scale's `trials`, `draws`, `share` or `factors`.
        overrides: ``key=value`` settings for every run.
        options: config keys for every run.

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
    """Raise an error if learning-rate factors would have no effect."""
    given = next((text for text in overrides if text.startswith(RATE)), None)
    reasons = {
        f"they are sampled ({scale.draws} draws); --draws 0 tunes them": scale.draws,
        f"{given} is set": given,
        "it does not tune them; pass one factor": not experiment.tuned and len(scale.factors) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{experiment.name} cannot try learning-rate factors: {reason}")


def methods(arm: Arm) -> list[Row]:
    """An arm's methods, in the paper's order."""
    axes = product(arm.algorithms, arm.averaging, arm.optimizers)
    return [Row(algorithm, optimizer, averaging) for algorithm, averaging, optimizer in axes]


def cases(order: Order) -> list[Case]:
    """All cases that need a learning rate."""
    found = [
        Case(dataset, targets, method)
        for dataset, arm in product(order.datasets, order.arms)
        if not arm.has_rate
        for method, targets in product(methods(arm), order.held_out(dataset))
    ]
    return list(dict.fromkeys(found))


def rates_tried(order: Order, case: Case) -> list[float]:
    """Learning rates to try: multiples of the optimizer's default in the space `fair`."""
    factors = order.scale.factors
    if not order.tunes and len(factors) != 1:
        factors = (1.0,)
    default = float(optimizer_spec(case.method.optimizer).lr.default)
    return [float(f"{factor * default:.3g}") for factor in factors]


def default_rates(order: Order) -> dict[Case, Rate]:
    """Learning rates without tuning: the defaults, times the factor if there is exactly one."""
    return {case: Rate(rates_tried(order, case)[0]) for case in cases(order)}


def first_configs(order: Order) -> list[RunConfig]:
    """The config of one run per dataset."""
    found = {grid.datasets[0]: grid for grid in reversed(grids(order, default_rates(order)))}
    return [next(jobs(grid))[1] for grid in found.values()]


def tuning_grids(order: Order) -> list[Grid]:
    """The runs that tune learning rates: short runs of the first trial."""
    first = {arm.steps or 0: arm for arm in reversed(order.arms)}
    arm = first[min(first)]  # the shortest runs that the experiment has
    found = []
    for case in cases(order) if order.tunes else ():
        steps = max(2, round(order.scale.tuning * (order.steps(arm, case.dataset) - 1))) + 1
        found += [_grid(order, case, steps, lr) for lr in rates_tried(order, case)]
    return found


def grids(order: Order, rates: Mapping[Case, Rate]) -> list[Grid]:
    """The runs of the experiment itself whose learning rates are known."""
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
    """The runs of an arm; without an arm, the tuning run of a learning rate."""
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
    """Select, for every case, the learning rate with the best training-domain validation.

    Each case uses only its own runs, because the validation data of other targets' runs includes
    this target. Cases whose tuning is incomplete are left out, and those whose runs all diverged.

    Args:
        order: the experiment.
        runs: finished tuning runs.
        diverged: those of `tuning_grids` whose run diverged.
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
