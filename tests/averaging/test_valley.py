"""Which segments the search picks: by hand, and against the rules spelled out slowly."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from steppe.averaging.valley import VALLEYS
from tests.averaging.oracles import ORACLES


def search(counting, losses, n_s=3, n_e=6, r=0.3, resume=False):
    """What is averaged in the end, when the valley died, and the most segments kept at a time.

    Only what is `needed` is kept: a decision for another segment fails.
    """
    valley = VALLEYS[counting](n_s, n_e, r)
    kept, average, dead_at, most = set(), [], None, 0

    def carry_out(decision):
        if decision.restart:
            average.clear()
        assert set(decision.add) <= kept
        average.extend(decision.add)

    for number, loss in enumerate(losses):
        if resume:
            state = json.loads(json.dumps(valley.state_dict()))
            valley = VALLEYS[counting](n_s, n_e, r)
            valley.load_state_dict(state)
        if not valley.dead:
            assert valley.looks == number
            kept.add(number)
        carry_out(valley.look(loss))
        kept &= valley.needed
        most = max(most, len(kept))
        if valley.dead and dead_at is None:
            dead_at = number
            assert not kept
    carry_out(valley.end())
    assert valley.added == len(average)
    return average, dead_at, most


LATE = (1.3, 1.3, 1.25, 1.2, 1.1, 1.0, 1.1, 1.1)
"""Converges at segment 5, which the last look shows; the threshold is 1.3867."""

# Losses; N_s, N_e; segments in the reference's average, in the paper's; the look of their death.
BY_HAND = {
    "late convergence looks back, segment 5 twice": (
        (*LATE, 1.0, 1.0, 1.0, 1.0), (3, 6),
        [3, 4, 5, 5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11], None, None,
    ),
    "a segment above the threshold stops the look back, and hides the next": (
        (5.0, 4.0, 3.0, *LATE[3:], 1.0, 1.0, 1.0, 1.0), (3, 6),
        [4, 5, 5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11], None, None,
    ),
    "early convergence counts the first ones again": (
        (1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1), (3, 6),
        [1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], None, None,
    ),
    "a dead valley, whatever comes after": (
        (1.0, 1.1, 1.1, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0), (3, 6),
        [1, 2, 0, 0, 0, 1, 2], [0, 1, 2], 8, 8,
    ),
    "five above the threshold are not six": (
        (1.0, 1.1, 1.1, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0), (3, 6),
        [1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], None, None,
    ),
    "never converged": (
        (6.0, 5.0, 4.0, 3.0, 2.0), (3, 6),
        [4], [0, 1, 2, 3, 4], None, None,
    ),
    "fewer looks than it takes": (
        (1.0, 2.0), (3, 6),
        [1], [0, 1], None, None,
    ),
    "the queue drains up to the last loss below the threshold": (
        (*LATE, 1.0, 2.0, 1.0, 2.0, 2.0), (3, 6),
        [3, 4, 5, 5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11, 12], None, None,
    ),
    "the end comes with convergence": (
        LATE, (3, 6),
        [3, 4, 5, 3, 4, 5, 6, 7], [5, 6, 7], None, None,
    ),
    "queues of one length lose the convergence segment": (
        (3.0, 1.0, 1.1, 1.0), (2, 2),
        [2, 3], [1, 2, 3], None, None,
    ),
    "unless nothing else comes": (
        (3.0, 1.0, 2.0, 9.0), (2, 2),
        [1], [1], 3, 3,
    ),
    "a shorter second queue": (
        (1.0, 1.1, 1.2, 1.0, 5.0), (3, 1),
        [1, 2, 3], [0, 1, 2, 3], 4, 4,
    ),
    "the end is not looked for before convergence is found": (
        (1.0, 9.0, 1.0, 1.0), (3, 1),
        [1, 2, 3], [0, 1, 2, 3], None, None,
    ),
    "but its losses may be of the window": (
        (1.0, 5.0, 5.0, 5.0), (3, 3),
        [0], [0], 3, 3,
    ),
    "equal losses converge": (
        (1.0, 1.0, 1.0, 1.0), (3, 3),
        [1, 2, 3], [0, 1, 2, 3], None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("counting", VALLEYS)
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name, counting):
    losses, (n_s, n_e), of_reference, of_paper, reference_death, paper_death = BY_HAND[name]
    expected = {
        "reference": (of_reference, reference_death),
        "paper": (of_paper, paper_death),
    }[counting]
    assert search(counting, losses, n_s, n_e)[:2] == expected
    # The oracle that judges below is itself judged here.
    assert ORACLES[counting](losses, n_s, n_e, 0.3) == expected


lengths = st.integers(1, 7)
# Few values, so that there are ties; three parts, so that there are valleys to find.
falling = st.lists(st.integers(4, 9), max_size=9).map(lambda part: sorted(part, reverse=True))
curves = st.builds(
    lambda *parts: [float(loss) for part in parts for loss in part],
    falling,
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.lists(st.integers(3, 9), max_size=12),
)


@pytest.mark.parametrize("counting", VALLEYS)
@settings(max_examples=400)
@given(losses=curves, n_s=lengths, n_e=lengths, r=st.sampled_from([0.1, 0.3, 1.0]))
@example(losses=[1.0], n_s=1, n_e=1, r=0.3)
@example(losses=[0.0] * 9, n_s=3, n_e=3, r=0.3)  # the threshold is not above the losses
def test_against_the_rules(counting, losses, n_s, n_e, r):
    average, dead_at, most = search(counting, losses, n_s, n_e, r)
    assert (average, dead_at) == ORACLES[counting](losses, n_s, n_e, r)
    assert most <= max(n_s, n_e)
    assert search(counting, losses, n_s, n_e, r, resume=True) == (average, dead_at, most)


@pytest.mark.parametrize("counting", VALLEYS)
def test_no_look_no_segment(counting):
    assert search(counting, []) == ([], None, 0)


def test_negative_losses_leave_the_paper_its_start():
    """The threshold is then below the losses of the window, the start's included."""
    assert search("paper", [-1.0] * 6, 2, 3)[:2] == ([0], 3)
