"""What the files of the axes declare: read without importing them, it is what importing gives."""

import importlib
from typing import Annotated, Any

import pytest
import torch
from torch import nn

from steppe.algorithms.registry import algorithms
from steppe.averaging.registry import averages, register_averaging
from steppe.axes import AxisSpec
from steppe.errors import UserError
from steppe.optim.registry import optimizers, register_optimizer
from steppe.options import Option, declared_options, further_options
from steppe.registry import Registry
from steppe.search import Uniform

AXES = (algorithms, averages, optimizers)
ENTRIES = [spec for axis in AXES for spec in axis.entries()]


@pytest.mark.parametrize("spec", ENTRIES, ids=lambda spec: spec.name)
def test_read_or_imported_an_entry_is_the_same(spec: AxisSpec) -> None:
    assert spec.options == declared_options(spec.cls)
    assert spec.further == (further_options(spec.cls) if "steppe" in str(spec.target) else {})
    assert spec.summary
    assert spec.citation or spec.name == "none"
    for name, option in spec.options.items():
        assert option.meaning, f"{spec.name}: the docstring does not say what {name} means"


def test_options_that_a_parent_declares_are_a_childs_too() -> None:
    class Parent:
        """A parent.

        Args:
            share: how much,
                in parts of the whole.
        """

        def __init__(self, *, share: Annotated[float, Option(Uniform(0, 1), high=1)] = 0.5) -> None:
            self.share = share

    class Child(Parent):
        def __init__(self, size: "Annotated[int, Option(low=1)]" = 2, **options: Any) -> None:
            super().__init__(**options)

    found = declared_options(Child)
    assert list(found) == ["share", "size"]
    assert found["share"].meaning == "how much, in parts of the whole."
    assert found["share"].search == Uniform(0, 1)
    found["size"].check("size", 1)
    with pytest.raises(UserError, match="size=0: expected a whole number, at least 1"):
        found["size"].check("size", 0)


def test_plain_values_beside_the_declared_options_are_found_with_their_meaning() -> None:
    further = optimizers["fad"].further
    assert further["ratio"].default == 1.0
    assert further["ratio"].meaning.startswith("the fraction of steps")
    assert not {"model", "generators", "base", "hyper", "rho"} & further.keys()
    assert "adaptive" in optimizers["sam"].further
    assert "adaptive" not in optimizers["asam"].further  # it is not the caller's to choose


def test_a_class_of_steppes_can_have_a_second_name() -> None:
    from steppe.optim import SAM, build_optimizer

    again = register_optimizer("sam-again", passes=2, citation="Foret et al., 2021")
    try:
        assert again(SAM) is SAM
        assert isinstance(build_optimizer("sam-again", [torch.zeros(1)], rho=0.1), SAM)
        assert optimizers["sam"].target == "steppe.optim.sam:SAM"
    finally:
        optimizers._table.pop("sam-again", None)


def test_a_module_can_be_reloaded_and_code_without_a_module_can_register() -> None:
    import steppe.averaging.sma as module

    names, known = list(averages), module.SMA
    try:
        assert importlib.reload(module).SMA is not known  # as a notebook's autoreload does
        assert list(averages) == names
    finally:
        module.SMA = known
    code = "class Own(SMA):\n    'An average.'\nregister_averaging('own')(Own)"
    given = {"__name__": "nowhere", "SMA": known, "register_averaging": register_averaging}
    try:
        exec(code, given)
        assert averages["own"].cls is given["Own"]
    finally:
        averages._table.pop("own", None)


def test_a_registry_answers_in_any_case_and_protects_its_own_names() -> None:
    own = AxisSpec(name="Own", target=nn.Linear)
    table = Registry("thing", lambda: [own])
    assert table["OWN"] is own
    with pytest.raises(UserError, match="thing 'own' already exists"):
        table.add(AxisSpec(name="own", target=nn.Linear))
    mine = [AxisSpec(name="mine", target=nn.Linear) for _ in range(2)]
    for spec in mine:  # as when a notebook's cell runs again
        table.add(spec)
    assert table["mine"] is mine[1]
    assert list(table) == ["Own", "mine"]
    assert len(table) == 2
    with pytest.raises(UserError, match="unknown thing 'mime', did you mean 'mine'"):
        table["mime"]


def test_a_registry_that_failed_to_fill_says_so_again() -> None:
    def broken() -> list[AxisSpec]:
        raise ImportError("not there")

    table = Registry("thing", broken)
    for _ in range(2):
        with pytest.raises(ImportError, match="not there"):
            table["mine"]


@pytest.mark.parametrize(
    ("default", "good", "bad", "expected"),
    [
        (False, True, 1, "true or false"),
        ("a", "b", 2, "text"),
        ((), ("x",), "x", "a list"),
        (1, 2, True, "a whole number"),
    ],
)
def test_a_value_is_of_the_kind_of_its_default(default, good, bad, expected) -> None:
    Option(default=default).check("it", good)
    with pytest.raises(UserError, match=f"it={bad!r}: expected {expected}"):
        Option(default=default).check("it", bad)


def test_a_plain_optimizer_is_told_how_to_register() -> None:
    with pytest.raises(UserError, match="Mine does not wrap another optimizer. Pass base=None"):
        register_optimizer("mine", passes=1)(type("Mine", (torch.optim.SGD,), {}))
