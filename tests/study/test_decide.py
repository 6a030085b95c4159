"""`study.decide`: claims end rightly, however often one looks, and methods stop when not needed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from steppe.errors import UserError
from steppe.study import Claim, Design, Method
from steppe.study.decide import State, rule, state, tuned
from steppe.study.design import Plan, parsed
from steppe.study.outcomes import Outcome, Slot
from steppe.study.power import forecast

Accuracies = Mapping[str, np.ndarray]
"""By method: seeds x targets."""


def design(claims: Sequence[tuple[str, str]], **values: Any) -> Design:
    names = dict.fromkeys(name for claim in claims for name in claim)
    explored = values.pop("explore", ())
    names |= dict.fromkeys(name for claim in explored for name in claim)
    return Design(
        **{
            "dataset": "RotatedDigits",
            "targets": ("60", "75"),
            "methods": tuple(Method(name=name, optimizer=name) for name in names),
            "claims": (
                *(Claim(a=a, b=b) for a, b in claims),
                *(Claim(a=a, b=b, confirmatory=False) for a, b in explored),
            ),
            "first_seeds": 7,
            "max_seeds": 30,
            "twins": 0,
            **values,
        }
    )


def planned(made: Design) -> Plan:
    return Plan(design=made, digest=made.digest())


def outcomes(made: Design, accuracies: Accuracies) -> dict[Slot, Outcome]:
    return {
        Slot("run", method, seed, target): Outcome(float(value), seconds=36.0)
        for method, table in accuracies.items()
        for seed, row in enumerate(table)
        for target, value in zip(made.targets, row, strict=True)
    }


def carried_out(plan: Plan, answer: Callable[[Slot], Outcome]) -> tuple[State, dict[Slot, Outcome]]:
    known: dict[Slot, Outcome] = {}
    while not (found := state(plan, known)).over:
        known |= {slot: answer(slot) for slot in found.todo}
    return found, known


THREE = [("fad", "sgd"), ("fad", "adam"), ("sam", "sgd")]
"""Claims that share methods, so that their differences are correlated."""


def simulated(
    seed: int,
    studies: int,
    means: Mapping[str, float],
    claims: Sequence[tuple[str, str]],
    **own: Any,
) -> tuple[Design, list[list[str]]]:
    """The verdicts of simulated studies that look after every seed."""
    made = design(claims, targets=("60",), **own)
    rng, found = np.random.default_rng(seed), []
    for _ in range(studies):
        shared = rng.normal(-30, 4, (made.max_seeds, 1))  # the split and the batches: paired
        table = {name: shared + rng.normal(mean, 1, shared.shape) for name, mean in means.items()}
        known = outcomes(made, table)
        found.append([rule(made, known, claim).verdict for claim in made.claims])
    return made, found


def test_false_decisions_are_at_most_the_stated_rate() -> None:
    """Over all claims of a study together: no method differs from another."""
    _, found = simulated(0, 2000, dict.fromkeys(("fad", "sgd", "adam", "sam"), 80.0), THREE)
    assert np.mean([any(v in ("better", "worse") for v in verdicts) for verdicts in found]) <= 0.05


def test_a_difference_that_matters_is_not_called_equivalent() -> None:
    """The hardest case: all differences are exactly the smallest that matters."""
    means = {"fad": 81.0, "sgd": 80.0, "adam": 80.0, "sam": 81.0}
    made, found = simulated(1, 2000, means, THREE, first_seeds=9)
    wrong = [any(v in ("equivalent", "worse") for v in verdicts) for verdicts in found]
    assert np.mean(wrong) <= 0.05
    assert made.level == pytest.approx(0.05 / 3)


@pytest.mark.parametrize(
    ("effect", "right"), [(2.0, "better"), (1.2, "better"), (0.0, "equivalent")]
)
def test_power_is_as_forecast(effect: float, right: str) -> None:
    """Within five points, and the number of seeds too."""
    means = {"fad": 80.0 + effect, "sgd": 80.0}
    made, found = simulated(2, 2000, means, [("fad", "sgd")], smallest_effect=1.2)
    expected = forecast(made, 2**0.5, effect, made.level)
    assert np.mean([verdicts == [right] for verdicts in found]) == pytest.approx(
        expected.power, abs=0.05
    )
    if expected.power > 0.5:
        assert expected.typical is not None


def test_looking_after_every_round_is_looking_once_at_all_of_them() -> None:
    """A study that stops methods on its way ends with the verdicts of one that has all runs."""
    made = design(THREE, explore=[("sam", "adam")])
    rng = np.random.default_rng(3)
    for _ in range(20):
        means = {"fad": 82.0, "sgd": 80.0, "adam": 81.9, "sam": 80.1}
        tables = {name: rng.normal(mean, 1, (30, 2)) for name, mean in means.items()}
        whole = outcomes(made, tables)
        found, known = carried_out(planned(made), whole.__getitem__)
        assert known.keys() <= whole.keys()
        for ruling in found.rulings:
            if ruling.claim.confirmatory:
                full = rule(made, whole, ruling.claim)
                assert (full.verdict, full.looks) == (ruling.verdict, ruling.looks)
        assert not any(ruling.open for ruling in found.rulings)


def test_methods_that_no_open_claim_needs_stop() -> None:
    """FAD is far better than SGD, and Adam is not: after the first look, SGD is not run again."""
    made = design([("fad", "sgd"), ("fad", "adam")])
    rng = np.random.default_rng(4)
    means = {"fad": 90.0, "sgd": 50.0, "adam": 90.0}
    tables = {name: rng.normal(mean, 2, (30, 2)) for name, mean in means.items()}
    found, known = carried_out(planned(made), outcomes(made, tables).__getitem__)
    seeds = {name: 1 + max(s.seed for s in known if s.method == name) for name in means}
    assert seeds["sgd"] == made.first_seeds < seeds["fad"] == seeds["adam"]
    assert found.rulings[0].verdict == "better"


def test_exploratory_claims_never_prolong_a_study() -> None:
    made = design([("fad", "sgd")], explore=[("fad", "adam")])
    rng = np.random.default_rng(5)
    means = {"fad": 90.0, "sgd": 50.0, "adam": 90.0}
    tables = {name: rng.normal(mean, 2, (30, 2)) for name, mean in means.items()}
    found, known = carried_out(planned(made), outcomes(made, tables).__getitem__)
    assert len(known) == 3 * 2 * made.first_seeds
    assert found.rulings[1].reason == "exploratory claims add no runs"


def test_the_budget_ends_open_claims() -> None:
    """36 s a run and two targets: 14 runs a method for the first look, 4 for every further seed."""
    made = design([("fad", "sgd")], budget_hours=0.5)
    rng = np.random.default_rng(6)
    tables = {name: rng.normal(80, 3, (30, 2)) for name in ("fad", "sgd")}
    found, known = carried_out(planned(made), outcomes(made, tables).__getitem__)
    assert len(known) == 48, "0.48 of 0.5 hours; four more runs would be 0.52"
    (ruling,) = found.rulings
    assert (ruling.verdict, ruling.open) == ("undecided", False)
    assert ruling.reason == "another look would exceed the budget of 0.5 hours"


def test_a_slow_first_run_does_not_end_a_study() -> None:
    """What a look costs is known when it is complete: one that has begun is finished."""
    made = design([("fad", "sgd")], budget_hours=1.0, twins=2)
    known = {Slot("run", "fad", 0, "60"): Outcome(80.0, seconds=600.0)}
    assert len(state(planned(made), known).todo) == 2 * 2 * 7 - 1 + 2 * 2


def test_a_failed_run_ends_its_claims_only() -> None:
    """Leaving out its seed would favor the method that fails."""
    made = design([("fad", "sgd"), ("adam", "sgd")])
    rng = np.random.default_rng(7)
    whole = outcomes(made, {n: rng.normal(80, 3, (30, 2)) for n in ("fad", "sgd", "adam")})
    whole[Slot("run", "fad", 2, "75")] = Outcome(None, error="diverged")
    found, known = carried_out(planned(made), whole.__getitem__)
    first, second = found.rulings
    assert (first.verdict, first.reason) == ("undecided", "failed: fad on 75, seed 2")
    assert second.last is not None
    assert second.last.seeds > made.first_seeds
    assert max(slot.seed for slot in known if slot.method == "fad") == made.first_seeds - 1


def test_tuning_comes_first_and_looks_at_its_own_target_only() -> None:
    lrs = tuple((f"optimizer.lr={lr}",) for lr in (0.1, 0.2, 0.3))
    made = design([("fad", "sgd")], tuning_seeds=2)
    fad = made.methods[0].model_copy(update={"tries": lrs})
    made = made.model_copy(update={"methods": (fad, made.methods[1])})
    first = state(planned(made), {}).todo
    assert {(slot.kind, slot.method) for slot in first} == {("tune", "fad")}
    assert len(first) == 3 * 2 * 2
    best = {"60": 2, "75": 1}

    def answer(slot: Slot) -> Outcome:
        if slot.choice == 0 and slot.seed == 1:
            return Outcome(None, error="diverged")  # and so it cannot be chosen
        score = 99.0 if slot.choice == 0 else 80.0 + (slot.choice == best[slot.target])
        return Outcome(1.0, validation=score)

    known = {slot: answer(slot) for slot in first}
    for target, choice in best.items():
        assert tuned(made, known, "fad", target) == lrs[choice]
    assert tuned(made, known, "sgd", "60") == ()
    assert {slot.kind for slot in state(planned(made), known).todo} == {"run"}


def test_a_design_is_checked() -> None:
    seven = [("fad", name) for name in ("sgd", "adam", "sam", "gam", "yogi", "adamw", "asam")]
    for claims, words in (
        (seven, "1 to 6 confirmatory claims, got 7: declare the others with --explore"),
        ([("fad", "sgd"), ("sgd", "fad")], "two claims compare 'sgd' and 'fad'"),
        ([("fad", "sgd"), ("fad", "fad")], "compares 'fad' with itself"),
    ):
        with pytest.raises(ValueError, match=words):
            design(claims)
    made = design([("fad", "sgd")])
    facts = planned(made).model_dump()
    facts["design"]["smallest_effect"] = 5.0
    with pytest.raises(UserError, match="the design was changed after the study was planned"):
        parsed(Plan, facts, "study.json")
