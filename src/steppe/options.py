"""Options, declared where they live: on the constructor of the class that has them.

    def __init__(self, ..., rho: Annotated[float, Option(LogUniform(-2, 0))] = 0.05)

says the default, what a search draws from and which values make sense; the class's docstring says
what it means. Registries, search spaces, `--help`, docs and tests are derived from that.
"""

import ast
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from steppe.errors import UserError, shown
from steppe.search import Distribution, Fixed, Hyperparameter

_PLAIN = {"bool", "int", "float", "str", "None", "Hyper"}
"""Types of values that a config can have; a `Hyper` may be a number."""
_WORDS = {bool: "true or false", str: "a text", tuple: "a list"}


@dataclass(frozen=True)
class Like:
    """Drawn from what the optimizer's option of this name is drawn from."""

    option: str

    def __repr__(self) -> str:
        return f"as the optimizer's `{self.option}`"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        search: what a search draws it from; None: a search leaves it as it is.
        low: the smallest number that makes sense.
        above: the value that it must exceed, where there is no smallest one.
        high: the largest number that makes sense.
        choices: the values that it may have, if it is not a number.
        drawn_as: the name under which DomainBed seeds the draw, where it is not the option's.
        default: the constructor's. None: as the optimizer's option of that name. If it is a whole
            number, a flag, a text or a list, so are the values.
        meaning: in words, from the docstring.
    """

    search: Distribution | Like | None = None
    low: float = 0.0
    above: float | None = None
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    drawn_as: str = ""
    default: Any = None
    meaning: str = ""

    @property
    def distribution(self) -> Distribution | Like:
        return Fixed(self.default) if self.search is None else self.search

    @property
    def hyperparameter(self) -> Hyperparameter:
        """Its default and distribution, for options that have their own."""
        assert not isinstance(self.distribution, Like)
        return Hyperparameter(self.default, self.distribution)

    def check(self, where: str, value: Any) -> None:
        """Refuses a value that makes no sense.

        Examples:
            >>> Option(default=1, low=1).check("averaging 'swad': every", 0)
            Traceback (most recent call last):
            steppe.errors.UserError: averaging 'swad': every=0: expected a whole number, at least 1
        """
        if not self._fits(value):
            raise UserError(f"{where}={shown(value)}: expected {self.expected}")

    def _fits(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if value is None:
            return self.default is None
        if isinstance(self.default, tuple):
            return isinstance(value, list | tuple)
        if isinstance(self.default, bool | str):
            return isinstance(value, type(self.default))
        kind = int if isinstance(self.default, int) else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
            return False
        enough = value >= self.low if self.above is None else value > self.above
        return enough and value <= self.high

    @property
    def expected(self) -> str:
        """The values that make sense, in words."""
        if self.choices:
            return " or ".join(map(repr, self.choices))
        for other, words in _WORDS.items():
            if isinstance(self.default, other):
                return words
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        least = (
            f", at least {self.low:g}" if self.above is None else f" greater than {self.above:g}"
        )
        most = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        return kind + least + most


def declared_options(cls: type) -> dict[str, Option]:
    """The options that a class declares, its parents' included where it hands keywords on."""
    found: dict[str, Option] = {}
    for ancestor, init in _constructors(cls):
        meanings = dict(arguments(inspect.getdoc(ancestor) or ""))
        own = {
            p.name: replace(marker, default=p.default, meaning=meanings.get(p.name, ""))
            for p in inspect.signature(init).parameters.values()
            for marker in _markers(p.annotation, init.__globals__)
        }
        found = own | found
    return found


def further_options(cls: type) -> dict[str, Option]:
    """Plain values that a constructor also takes; a config has them only where they are given."""
    found: dict[str, Option] = {}
    declared = declared_options(cls)
    for ancestor, init in _constructors(cls):
        meanings = dict(arguments(inspect.getdoc(ancestor) or ""))
        for p in inspect.signature(init).parameters.values():
            words = set(re.findall(r"\w+", inspect.formatannotation(p.annotation)))
            # What a parent takes by position is the child's to give.
            handed_on = ancestor is cls or p.kind is p.KEYWORD_ONLY
            if p.name in meanings and words <= _PLAIN and p.default is not p.empty and handed_on:
                found.setdefault(p.name, Option(default=p.default, meaning=meanings[p.name]))
    return {name: option for name, option in found.items() if name not in declared}


def _constructors(cls: type) -> Iterator[tuple[type, Any]]:
    """A class and its parents, as far as each hands keywords on to the next."""
    for ancestor in cls.__mro__:
        init = vars(ancestor).get("__init__")
        if inspect.isfunction(init):
            yield ancestor, init
            parameters = inspect.signature(init).parameters.values()
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                return


def _markers(annotation: Any, names: dict[str, Any]) -> Iterator[Option]:
    values = getattr(annotation, "__metadata__", ())
    if isinstance(annotation, str):
        tree = ast.parse(annotation, mode="eval").body
        if isinstance(tree, ast.Subscript) and ast.unparse(tree.value).endswith("Annotated"):
            assert isinstance(tree.slice, ast.Tuple)  # the type stays unread: it may need torch
            values = tuple(evaluate(node, names) for node in tree.slice.elts[1:])
    yield from (value for value in values if isinstance(value, Option))


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression in a file of ours, or of a plugin that was imported."""
    return eval(compile(ast.Expression(node), "<declaration>", "eval"), names)


def arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """What the section `Args` of a docstring says, by name."""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.M)
    entry = r"^    (\w+): ((?:.*\n?)(?:     .*\n?)*)"
    for found in re.finditer(entry, section[1] if section else "", re.M):
        yield found[1], " ".join(found[2].split())
