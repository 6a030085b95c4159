"""Averages by name, and errors that say what would be right."""

import pytest
from torch import nn

from steppe.averaging import (
    SMA,
    SWAD,
    Averaging,
    NoAveraging,
    averaging_names,
    averaging_spec,
    build_averaging,
)
from steppe.errors import UserError


def test_names_and_defaults():
    assert averaging_names() == ("none", "swad", "sma", "bma")
    assert averaging_spec("bma").default_options == {"beta": 0.5}
    assert averaging_spec("none").default_options == {}
    assert averaging_spec("sma").default_options == {"start": 100, "refresh": False}
    assert averaging_spec("swad").default_options == {
        "every": 100,
        "n_converge": 3,
        "n_tolerance": 6,
        "tolerance": 0.3,
        "counting": "reference",
    }


@pytest.mark.parametrize("name", averaging_names())
def test_every_entry_can_be_built(name):
    spec = averaging_spec(name.upper())
    assert spec.name == name
    assert bool(spec.citation) == (name != "none")
    spec.check(spec.default_options)
    built = build_averaging(name.title(), nn.Linear(2, 2), steps=5, **spec.default_options)
    assert type(built) is spec.cls
    assert isinstance(built, Averaging)


def test_options_arrive():
    swad = build_averaging(
        "swad", nn.Linear(2, 2), every=7, n_converge=2, n_tolerance=4, tolerance=0.2,
        counting="paper",
    )  # fmt: skip
    assert isinstance(swad, SWAD)
    valley = swad.valley
    assert (swad.every, valley.n_converge, valley.n_tolerance, valley.tolerance) == (7, 2, 4, 0.2)
    assert valley.by_iterates
    sma = build_averaging("sma", nn.Linear(2, 2), start=3)
    assert isinstance(sma, SMA)
    assert sma.start == 3
    assert isinstance(build_averaging("none", nn.Linear(2, 2)), NoAveraging)


WHOLE = "expected a whole number, at least"
WRONG = [
    ("swad", {"every": 0}, f"every=0: {WHOLE} 1"),
    ("swad", {"every": 100.0}, f"every=100.0: {WHOLE} 1"),
    ("swad", {"n_converge": 0}, f"n_converge=0: {WHOLE} 1"),
    ("swad", {"n_tolerance": -1}, f"n_tolerance=-1: {WHOLE} 1"),
    ("swad", {"n_tolerance": True}, f"n_tolerance=True: {WHOLE} 1"),
    ("swad", {"tolerance": 0}, "tolerance=0: expected a number greater than 0"),
    ("swad", {"tolerance": float("nan")}, "tolerance=nan: expected a number greater than 0"),
    ("swad", {"tolerance": float("inf")}, "tolerance=inf: expected a number greater than 0"),
    ("swad", {"tolerance": "0.3"}, "tolerance='0.3': expected a number greater than 0"),
    ("swad", {"counting": "Paper"}, "counting='Paper': expected 'reference' or 'paper'"),
    ("swad", {"counting": ["paper"]}, "expected 'reference' or 'paper'"),
    ("sma", {"start": -1}, f"start=-1: {WHOLE} 0"),
    ("sma", {"start": None}, f"start=None: {WHOLE} 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_a_wrong_value_is_named_with_what_is_right(name, options, message):
    with pytest.raises(UserError, match=f"averaging '{name}': .*{message}"):
        build_averaging(name, nn.Linear(2, 2), **options)
    with pytest.raises(UserError, match=message):  # past the registry, too
        averaging_spec(name).cls(nn.Linear(2, 2), **options)


def test_unknown_names_and_options():
    with pytest.raises(UserError, match="unknown averaging 'swda', did you mean 'swad'"):
        averaging_spec("swda")
    with pytest.raises(UserError, match="'swad': 'n_converges', did you mean 'n_converge'"):
        averaging_spec("swad").check({"n_converges": 3})
    with pytest.raises(UserError, match="averaging 'sma': 'every'"):
        averaging_spec("sma").check({"every": 3})
    with pytest.raises(UserError, match="averaging 'none' has no options: remove 'start'"):
        build_averaging("none", nn.Linear(2, 2), start=3)
