"""The design of a study: its claims and everything that is fixed before the first run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from steppe import strangers
from steppe.durable import replace
from steppe.errors import UserError, shown, unknown
from steppe.sealed import KEY, Broken, seal, unseal

VERSION = 1
FILE = "study.json"
CONFIRMATORY = 6
"""How many claims may share the error rate; with more, none of them could be decided."""

FIXED = (
    *("dataset", "targets", "algorithm", "optimizer", "averaging", "recipe", "second_stage"),
    *("trial_seed", "seed", "draw", "space", "twin", "evaluate_both"),
)
"""Config keys that a study sets itself: another value would change what is compared."""


class _Fixed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Method(_Fixed):
    """One of the methods that claims compare."""

    name: str
    optimizer: str
    algorithm: str = "ERM"
    averaging: str = "none"
    overrides: tuple[str, ...] = ()
    """``key=value`` settings, such as ``steps=501``."""
    tries: tuple[tuple[str, ...], ...] = ()
    """Further settings of which tuning chooses one, for every target."""


class Claim(_Fixed):
    """The question whether one method is better than another."""

    a: str
    b: str
    confirmatory: bool = True
    """Whether it shares the error rate. Other claims are exploratory: nothing is proven by them."""
    added_after: int = 0
    """How many seeds were known when it was added to the plan."""

    @property
    def name(self) -> str:
        return f"{self.a} - {self.b}"


class Design(_Fixed):
    """What a study fixes before its first run."""

    dataset: str
    targets: tuple[str, ...] = Field(min_length=1)
    """Sets of held-out domains, each joined with ``+``."""
    methods: tuple[Method, ...] = Field(min_length=2)
    claims: tuple[Claim, ...] = Field(min_length=1)
    endpoint: Literal["average", "raw"] = "average"
    """Whether the moving average of the weights is compared, or the weights themselves."""
    selection: Literal["last", "train-val"] = "last"
    """Which step is compared: the last, or the best on source validation."""
    smallest_effect: float = Field(1.0, gt=0, le=100)
    alpha: float = Field(0.05, gt=0, lt=1)
    power: float = Field(0.8, gt=0, lt=1)
    budget_hours: float | None = Field(None, gt=0)
    first_seeds: int = Field(2, ge=2, le=1000)
    """Seeds of the first look."""
    max_seeds: int = Field(60, ge=2, le=1000)
    twins: int = Field(2, ge=0, le=1000)
    """Seeds on which the first claim's second method runs again with another rounding."""
    tuning_seeds: int = Field(1, ge=1, le=100)
    space: str = "fair"
    options: dict[str, Any] = {}
    overrides: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [method.name for method in self.methods]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two methods are called {name!r}")
            # The names of runs end with a method's name, or with it and ".twin" or ".tune2".
            if not strangers.is_name(name) or set(name) & set(":."):
                raise ValueError(f"{name!r} is not a valid name of a method")
        texts = [*self.overrides]
        for method in self.methods:
            texts += [*method.overrides, *(text for one in method.tries for text in one)]
        for key in (*self.options, *(text.partition("=")[0].strip() for text in texts)):
            if key in FIXED:
                raise ValueError(
                    f"a study sets {key!r} itself: choose methods with --claim and --method"
                )
        confirmatory = [claim for claim in self.claims if claim.confirmatory]
        if not 1 <= len(confirmatory) <= CONFIRMATORY:
            raise ValueError(
                f"a study has 1 to {CONFIRMATORY} confirmatory claims, got {len(confirmatory)}: "
                "declare the others with --explore"
            )
        if self.max_seeds < self.first_seeds:
            raise ValueError(
                f"max_seeds={self.max_seeds} is less than the {self.first_seeds} seeds of the "
                "first look"
            )
        if self.twins > self.max_seeds:
            raise ValueError(f"twins={self.twins} is more than max_seeds={self.max_seeds}")
        check_claims(self.claims, names)
        return self

    @property
    def level(self) -> float:
        """The error rate of each confirmatory claim (Bonferroni)."""
        return self.alpha / sum(claim.confirmatory for claim in self.claims)

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)

    def digest(self) -> str:
        """A hash of everything that is fixed."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Plan(_Fixed):
    """A design, and the exploratory claims that were added to it later."""

    version: int = VERSION
    design: Design
    digest: str
    added: tuple[Claim, ...] = ()
    commands: tuple[str, ...] = ()
    steppe: str = ""
    """The version that planned it."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        return (*self.design.claims, *self.added)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.digest != self.design.digest():
            raise ValueError("the design was changed after the study was planned")
        if any(claim.confirmatory for claim in self.added):
            raise ValueError("a claim that was added later cannot be confirmatory")
        check_claims(self.claims, [method.name for method in self.design.methods])
        return self


def check_claims(claims: Iterable[Claim], names: Iterable[str]) -> None:
    known, seen = list(names), set()
    for claim in claims:
        for name in (claim.a, claim.b):
            if name not in known:
                raise ValueError(unknown("method of a claim:", name, known))
        if claim.a == claim.b:
            raise ValueError(f"a claim compares {claim.a!r} with itself")
        pair = frozenset((claim.a, claim.b))
        if pair in seen:
            raise ValueError(f"two claims compare {claim.a!r} and {claim.b!r}")
        seen.add(pair)


def write_design(path: Path, plan: Plan) -> None:
    replace(path / FILE, seal(json.dumps(plan.model_dump(mode="json"), indent=1)) + b"\n")


def read_design(path: Path) -> Plan:
    """Read a planned study.

    Raises:
        UserError: it is missing, damaged, or its design was changed.
    """
    file = path / FILE
    try:
        facts = unseal(strangers.read(file))
    except FileNotFoundError:
        command = strangers.command("steppe", "study", "plan", path)
        raise UserError(f"{path} is not a study: plan one with: {command} --dataset ...") from None
    except Broken:
        raise UserError(
            f"{file} does not match its checksum: it was edited or damaged. A study's design is "
            f"fixed; restore the file, or plan another study in a new folder (entry {KEY!r})"
        ) from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: it is not valid JSON ({error})") from None
    if isinstance(version := facts.get("version"), int) and version > VERSION:
        raise UserError(f"{path} was planned by a newer steppe: pip install -U steppe")
    found: Plan = parsed(Plan, facts, str(file))
    return found


def parsed(cls: Any, facts: Any, where: str) -> Any:
    """Validate values against a model; a `UserError` names the first wrong one."""
    try:
        return cls.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        value = "" if first["type"] == "value_error" else f"={shown(first['input'])}"
        raise UserError(f"{where}: {f'{key}{value}: ' if key else ''}{message}") from None
