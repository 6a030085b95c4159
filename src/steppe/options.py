"""Options, declared on the constructor of the class that has them.

    def __init__(self, ..., rho: Annotated[float, Option(LogUniform(-2, 0))] = 0.05)

declares the default, the search distribution and the valid values; the class's docstring describes
the meaning. Registries, search spaces, `--help`, docs and tests derive from this declaration.
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
"""Types that a config can hold; a `Hyper` may be a number."""
_WORDS = {bool: "true or false", str: "text", tuple: "a list"}


@dataclass(frozen=True)
class Like:
    """The search distribution of the optimizer's option with this name, times a factor."""

    option: str
    factor: float = 1.0

    def __repr__(self) -> str:
        times = "" if self.factor == 1 else f"{self.factor:g} times "
        return f"{times or 'as '}the optimizer's `{self.option}`"


@dataclass(frozen=True)
class Option:
    """An option of an optimizer, algorithm, averaging or launcher.

    Attributes:
        search: the distribution that a search samples from; None does not search it.
        low: the smallest valid number.
        above: an exclusive lower bound, instead of `low`.
        high: the largest valid number.
        choices: the valid values, if it is not a number.
        drawn_as: the name with which DomainBed seeds its samples, if not the option's.
        relative_to: the hyperparameter that DomainBed's value is divided by to get this one.
        default: the constructor's default, which also sets the type. None means the value of the
            optimizer's option with the same name.
        meaning: the description in the class's docstring.
    """

    search: Distribution | Like | None = None
    low: float = 0.0
    above: float | None = None
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    drawn_as: str = ""
    relative_to: str = ""
    default: Any = None
    meaning: str = ""

    @property
    def distribution(self) -> Distribution | Like:
        return Fixed(self.default) if self.search is None else self.search

    @property
    def hyperparameter(self) -> Hyperparameter:
        """Its default and its own distribution."""
        assert not isinstance(self.distribution, Like)
        return Hyperparameter(self.default, self.distribution)

    def check(self, where: str, value: Any) -> None:
        """Raise an error for an invalid value.

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
        """A description of the valid values."""
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
    """The options that a class declares, with its parents' if it forwards keyword arguments."""
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
    """Other plain arguments of a constructor; a config contains them only if they are set."""
    found: dict[str, Option] = {}
    declared = declared_options(cls)
    handed_on = True
    for ancestor, init in _constructors(cls):
        meanings = dict(arguments(inspect.getdoc(ancestor) or ""))
        parameters = inspect.signature(init).parameters.values()
        for p in parameters:
            words = set(re.findall(r"\w+", inspect.formatannotation(p.annotation)))
            settable = p.default is not p.empty and (handed_on or p.kind is p.KEYWORD_ONLY)
            if p.name in meanings and words <= _PLAIN and settable:
                found.setdefault(p.name, Option(default=p.default, meaning=meanings[p.name]))
        # Without *args, the child itself sets what its parent takes by position.
        handed_on = handed_on and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return {name: option for name, option in found.items() if name not in declared}


def _constructors(cls: type) -> Iterator[tuple[type, Any]]:
    """A class and its parents, as long as each forwards keyword arguments to the next."""
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
            assert isinstance(tree.slice, ast.Tuple)  # skip the type, which may need torch
            values = tuple(evaluate(node, names) for node in tree.slice.elts[1:])
    yield from (value for value in values if isinstance(value, Option))


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """Evaluate an expression from one of steppe's files or an imported plugin."""
    return eval(compile(ast.Expression(node), "<declaration>", "eval"), names)


def arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Name and description of each entry in a docstring's `Args` or `Attributes` section."""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.M)
    entry = r"^    (\w+): ((?:.*\n?)(?:     .*\n?)*)"
    for found in re.finditer(entry, section[1] if section else "", re.M):
        yield found[1], " ".join(found[2].split())
