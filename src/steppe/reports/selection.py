"""Model selection: rules that pick a run and a step, as pure functions.

DomainBed's three rules report the mean ``test`` accuracy (its ``in``) over a run's targets; they
differ in the data they select by. The fourth, of Yu et al. (CVPR 2024), counts images instead of
averaging over domains, and reports all images of the targets. A rule takes the runs of one group (a
dataset, a method, a trial) and the final target domains. It returns its choice, or None if no run
has the required records. Sums are taken in DomainBed's order, so that the same runs tie. As in
DomainBed, the highest draw wins a tie.

For runs with weight averaging, only records of the averaged weights are candidates. A run without
such a record is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from steppe.validation import first_best, mean

from .runs import Key, Record, Run


@dataclass(frozen=True)
class Chosen:
    """The run and step that a rule selected."""

    run: Run
    step: int
    validation: float | None
    """The validation accuracy; None for a single run without validation data."""
    accuracy: float
    """The test accuracy to report, in [0, 1]."""

    @property
    def raw(self) -> float | None:
        """The test accuracy of the raw weights, if `accuracy` is an average's."""
        found = next(record.raw for record in self.run.records if record.step == self.step)
        values = [found.get(target) for target in _in_order(self.run)]
        return None if None in values else mean([value for value in values if value is not None])


Selection = Callable[[Iterable[Run], frozenset[str]], Chosen | None]


def train_validation(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    """Select by validation images of the source domains.

    Takes the first step of each run with the highest mean ``val`` accuracy over its source domains,
    then the best run.
    """
    return _by_validation(runs, targets, best_step)


def pooled_validation(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    """Select by validation images of the source domains, all in one pool.

    A large domain counts more than a small one. The reported accuracy is that on all images of the
    targets, ``test`` and ``oracle``, in one pool too. Runs whose records lack the number of images
    are left out.
    """
    return _by_validation(runs, targets, best_pooled_step)


def _by_validation(
    runs: Iterable[Run], targets: frozenset[str], best_of: Callable[[Run], Chosen | None]
) -> Chosen | None:
    found = [best for run in _ordered(runs, targets) if (best := best_of(run)) is not None]
    validated = [chosen for chosen in found if chosen.validation is not None]
    if not validated:  # a single run needs no validation
        return found[0] if len(found) == 1 else None
    return _best(validated)


def best_step(run: Run) -> Chosen | None:
    """The step that training-domain validation selects, or the last if there is no validation."""
    kept = vars(run)  # as a cached property would: tables and figures ask for the same step
    if "best_step" not in kept:
        kept["best_step"] = _best_step(run, _tests(run), mean_of)
    chosen: Chosen | None = kept["best_step"]
    return chosen


def best_pooled_step(run: Run) -> Chosen | None:
    """The same for validation images in one pool; None if their numbers are unknown."""
    tests = [(target, part) for target in _in_order(run) for part in ("test", "oracle")]
    if not run.images.keys() >= {*tests, *validation_keys(run)}:
        return None
    return _best_step(run, tests, partial(pooled, run.images))


def _best_step(
    run: Run, tests: Sequence[Key], score: Callable[[Record, Sequence[Key]], float | None]
) -> Chosen | None:
    needed = set(tests)
    records = [record for record in candidates(run) if record.accuracy.keys() >= needed]
    if not records:
        return None
    keys = validation_keys(run)
    values = [score(record, keys) for record in records]
    best = first_best(values) if keys else len(records) - 1
    test = None if best is None else score(records[best], tests)
    if best is None or test is None:
        return None
    # A second stage has no validation images, but its hyperparameters were validated in the first.
    validation = values[best] if keys else records[best].first_stage
    return Chosen(run, records[best].step, validation, test)


def validation_keys(run: Run) -> list[Key]:
    """The validation parts of the source domains; never those of a target."""
    sources = [domain for domain in run.domains if domain not in run.target_set]
    return [
        (domain, "val")
        for domain in sources
        if any((domain, "val") in record.accuracy for record in run.records)
    ]


def leave_one_out(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    r"""Select by source domains that additional runs hold out.

    For given hyperparameters and step, the validation accuracy is the mean over source domains
    \( v \) of the ``test`` accuracy on \( v \) in the run that holds out \( T \cup \{v\} \). All of
    these runs are required. The reported accuracy is that of the run that holds out \( T \) alone,
    at the best step of the best hyperparameters.
    """
    runs = list(runs)
    sets: dict[tuple[str | None, str, frozenset[str]], Run] = {}
    for run in sorted(runs, key=lambda run: run.order):
        sets[run.space, run.choice, run.target_set] = run
    found = []
    for run in _ordered(runs, targets):
        if sets[run.space, run.choice, targets] is not run:  # a repeated run
            continue
        others = [domain for domain in run.domains if domain not in targets]
        helpers = [sets.get((run.space, run.choice, targets | {v})) for v in others]
        chosen = _best_left_out(run, others, [h for h in helpers if h is not None])
        if chosen is not None:
            found.append(chosen)
    return _best(found)


def _best_left_out(run: Run, others: Sequence[str], helpers: Sequence[Run]) -> Chosen | None:
    if not others or len(helpers) < len(others):
        return None
    by_step = [{record.step: record for record in candidates(helper)} for helper in helpers]
    tests = _tests(run)
    found = []
    for record in candidates(run):
        test = mean_of(record, tests)
        values = [
            at[record.step].accuracy[domain, "test"]
            for domain, at in zip(others, by_step, strict=True)
            if record.step in at and (domain, "test") in at[record.step].accuracy
        ]
        if test is not None and len(values) == len(others):
            found.append(Chosen(run, record.step, mean(values), test))
    best = first_best([chosen.validation for chosen in found])
    return None if best is None else found[best]


def oracle(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    """Select by ``oracle`` images of the targets, at the last step only.

    This is an upper bound, not a usable method, because it looks at the targets.
    """
    found = [last for run in _ordered(runs, targets) if (last := last_step(run)) is not None]
    return _best(found)


def last_step(run: Run) -> Chosen | None:
    """The last step of one run, validated on the targets' ``oracle`` images."""
    records = candidates(run)
    if not records:
        return None
    last = records[-1]
    value = mean_of(last, [(target, "oracle") for target in _in_order(run)])
    test = mean_of(last, _tests(run))
    return None if value is None or test is None else Chosen(run, last.step, value, test)


SELECTIONS: dict[str, Selection] = {
    "train-val": train_validation,
    "pooled-val": pooled_validation,
    "leave-one-out": leave_one_out,
    "oracle": oracle,
}


STEP_RULES: dict[str, Callable[[Run], Chosen | None]] = {
    "train-val": best_step,
    "pooled-val": best_pooled_step,
    "oracle": last_step,
}
"""The rules that look at one run at a time: the step that each picks."""


def candidates(run: Run) -> Sequence[Record]:
    """The selectable records: for runs with averaging, only those of the averaged weights."""
    averaged = [record for record in run.records if record.averaged]
    return averaged if averaged or run.row.averaging != "none" else run.records


def mean_of(record: Record, keys: Sequence[Key]) -> float | None:
    """The mean accuracy over parts of domains; None if the record lacks one."""
    accuracy = record.accuracy
    try:
        return mean([accuracy[key] for key in keys]) if keys else None
    except KeyError:
        return None


def pooled(images: Mapping[Key, int], record: Record, keys: Sequence[Key]) -> float | None:
    """The accuracy over all images of several parts; None if the record lacks one."""
    try:
        # Accuracies are right / images, so this recovers the whole number.
        right = sum(round(record.accuracy[key] * images[key]) for key in keys)
    except KeyError:
        return None
    return right / sum(images[key] for key in keys) if keys else None


def by_target(chosen: Chosen, selection: str) -> dict[str, float]:
    """The accuracies that a rule reports, for each target of the run alone."""
    record = next(one for one in reversed(chosen.run.records) if one.step == chosen.step)
    found = {}
    for target in _in_order(chosen.run):
        parts = [(target, part) for part in ("test", "oracle")]
        value = (
            pooled(chosen.run.images, record, parts)
            if selection == "pooled-val"
            else record.accuracy.get(parts[0])
        )
        if value is not None:
            found[target] = value
    return found


def _in_order(run: Run) -> list[str]:
    """The targets in the dataset's order, so that the config's order does not affect rounding."""
    known = [domain for domain in run.domains if domain in run.target_set]
    return known + sorted(run.target_set.difference(known))


def _tests(run: Run) -> list[Key]:
    return [(target, "test") for target in _in_order(run)]


def _ordered(runs: Iterable[Run], targets: frozenset[str]) -> list[Run]:
    """The runs with exactly these targets, in an order independent of the file system."""
    own = (run for run in runs if run.target_set == targets)
    return sorted(own, key=lambda run: run.order)


def _best(found: Sequence[Chosen]) -> Chosen | None:
    best, highest = None, -math.inf
    for chosen in found:
        if chosen.validation is not None and chosen.validation >= highest:  # the last of ties
            best, highest = chosen, chosen.validation
    return best
