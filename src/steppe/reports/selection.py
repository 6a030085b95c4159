"""Which run and which step a table reports: three rules, as pure functions.

All report the mean over a run's targets of their ``test`` accuracy (DomainBed's ``in``); they
differ in what they look at to choose. Every rule takes the runs of one group (a dataset, a method,
a trial) and the domains that are held out in the end, and gives what it chose, or None where no run
has what it needs. Sums are taken in DomainBed's order, so that its ties are ties here too; of runs
that are level the one with the highest draw wins, as there.

Where weights are averaged, only records of the average are candidates: it is what the run is for.
A run that has none yet is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from steppe.validation import first_best, mean

from .runs import Key, Record, Run


@dataclass(frozen=True)
class Chosen:
    """What a rule chose, and what it saw."""

    run: Run
    step: int
    validation: float | None
    """The accuracy it went by; None where there was a single run with nothing to validate on."""
    accuracy: float
    """The number to report, from 0 to 1."""


Selection = Callable[[Iterable[Run], frozenset[str]], Chosen | None]


def train_validation(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    """Choose by validation images of the source domains.

    Per run the first step with the highest mean ``val`` accuracy over its source domains; then the
    best run.
    """
    found = [best for run in _ordered(runs, targets) if (best := best_step(run)) is not None]
    validated = [chosen for chosen in found if chosen.validation is not None]
    if not validated:  # one run needs no validation, several cannot do without
        return found[0] if len(found) == 1 else None
    return _best(validated)


def best_step(run: Run) -> Chosen | None:
    """The step of one run that train-domain validation chooses; the last without validation."""
    tests = _tests(run)
    records = [(r, test) for r in candidates(run) if (test := mean_of(r, tests)) is not None]
    if not records:
        return None
    keys = validation_keys(run)
    if not keys:
        record, test = records[-1]
        return Chosen(run, record.step, None, test)
    values = [mean_of(record, keys) for record, _ in records]
    best = first_best(values)
    if best is None:
        return None
    record, test = records[best]
    return Chosen(run, record.step, values[best], test)


def validation_keys(run: Run) -> list[Key]:
    """The validation parts of the source domains; never a target's, whatever a record has."""
    sources = [domain for domain in run.domains if domain not in run.target_set]
    return [
        (domain, "val")
        for domain in sources
        if any((domain, "val") in record.accuracy for record in run.records)
    ]


def leave_one_out(runs: Iterable[Run], targets: frozenset[str]) -> Chosen | None:
    r"""Choose by source domains that were held out as well.

    For hyperparameters and a step, the validation accuracy is the mean over source domains \( v \)
    of ``test`` accuracy on \( v \) in the run that holds out \( T \cup \{v\} \); all of these runs
    are required. The best step of the best hyperparameters counts, and the number comes from the
    run that holds out \( T \) alone.
    """
    runs = list(runs)
    sets: dict[tuple[str | None, str, frozenset[str]], Run] = {}
    for run in sorted(runs, key=lambda run: run.order):
        sets[run.space, run.choice, run.target_set] = run
    found = []
    for run in _ordered(runs, targets):
        if sets[run.space, run.choice, targets] is not run:  # the same once more
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
    """Choose by images of the targets themselves, at the last step only.

    An upper bound, not a method: it looks at the ``oracle`` images of the targets.
    """
    found = [last for run in _ordered(runs, targets) if (last := last_step(run)) is not None]
    return _best(found)


def last_step(run: Run) -> Chosen | None:
    """The last step of one run, seen with the targets' ``oracle`` images."""
    records = candidates(run)
    if not records:
        return None
    last = records[-1]
    value = mean_of(last, [(target, "oracle") for target in _in_order(run)])
    test = mean_of(last, _tests(run))
    return None if value is None or test is None else Chosen(run, last.step, value, test)


SELECTIONS: dict[str, Selection] = {
    "train-val": train_validation,
    "leave-one-out": leave_one_out,
    "oracle": oracle,
}
"""The rules by name."""


def candidates(run: Run) -> Sequence[Record]:
    """The records that may be chosen: where weights are averaged, those of the average only."""
    averaged = [record for record in run.records if record.averaged]
    return averaged if averaged or run.row.averaging != "none" else run.records


def mean_of(record: Record, keys: Sequence[Key]) -> float | None:
    """The mean accuracy over parts of domains, if the record has all of them."""
    accuracy = record.accuracy
    try:
        return mean([accuracy[key] for key in keys]) if keys else None
    except KeyError:
        return None


def _in_order(run: Run) -> list[str]:
    """The targets in the dataset's order, so that the order in the config changes no bit."""
    known = [domain for domain in run.domains if domain in run.target_set]
    return known + sorted(run.target_set.difference(known))


def _tests(run: Run) -> list[Key]:
    return [(target, "test") for target in _in_order(run)]


def _ordered(runs: Iterable[Run], targets: frozenset[str]) -> list[Run]:
    """The runs with just these targets, in an order that does not depend on how they were found."""
    own = (run for run in runs if run.target_set == targets)
    return sorted(own, key=lambda run: run.order)


def _best(found: Sequence[Chosen]) -> Chosen | None:
    best, highest = None, -math.inf
    for chosen in found:
        if chosen.validation is not None and chosen.validation >= highest:  # level: the later one
            best, highest = chosen, chosen.validation
    return best
