"""A protocol as a table: each setting that it fixes, with its value and where that comes from.

What a protocol compares (algorithms, optimizers, averaging) is never in its table, nor is anything
that only says how a run executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from steppe.errors import UserError, shown, unknown
from steppe.registry import Registry
from steppe.search import spaces
from steppe.training.config import MACHINE, RUN, RunConfig, keys

OWN = "the dataset's"
"""In a rule: the default of each dataset."""
FILE = "a file"
"""Among a rule's `others`: any file."""

PLAN: Mapping[str, type] = {
    "targets": str,  # as `Grid.targets`
    "trials": int,
    "draws": int,
    "default_draw": bool,
    "reruns": int,  # further splits for the winner of the search
    "space": str,
    "selection": str,
}
"""Settings of a sweep and its report, with their types."""
_COMPARED = {"algorithm", "optimizer", "averaging"}
_RUN = RunConfig.model_fields.keys() - keys(RUN, MACHINE) - _COMPARED
"""Config keys that a protocol can fix."""


@dataclass(frozen=True)
class Rule:
    """One setting that a protocol fixes.

    Attributes:
        value: the value for all datasets; `OWN` for each dataset's default, None if users must
            choose one of `others`.
        source: where the value comes from.
        others: values that users may choose instead.
        datasets: values for datasets where it differs, by name.
    """

    value: Any
    source: str
    others: tuple[Any, ...] = ()
    datasets: Mapping[str, Any] = field(default_factory=dict)

    def of(self, dataset: str) -> Any:
        return self.datasets.get(dataset, self.value)

    def offers(self, value: Any) -> bool:
        """Whether users may choose a value instead of the rule's own."""
        if FILE in self.others and isinstance(value, str) and value not in ("imagenet", "none"):
            return True
        return any(value == other and type(value) is type(other) for other in self.others)


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Attributes:
        name: what users type.
        about: what distinguishes it, in one line.
        citation: the paper.
        code: the code that its values were read from.
        rules: what it fixes: keys of `PLAN`, and keys of a run's config that are hyperparameters.
        note: what to know before using it.
    """

    name: str
    about: str
    citation: str
    rules: Mapping[str, Rule]
    code: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        from steppe.reports.selection import SELECTIONS  # slow to import

        for key in self.rules:
            if key not in PLAN and key not in _RUN:
                message = unknown(f"rule of protocol {self.name!r}:", key, [*PLAN, *sorted(_RUN)])
                raise UserError(message)
        for key, kind in PLAN.items():
            for value in self._values(key):
                if type(value) is not kind:
                    raise UserError(
                        f"protocol {self.name!r}: {key}={shown(value)} is not of type "
                        f"{kind.__name__}"
                    )
        if any(self._values("reruns")) and self._values("trials") != [1]:
            raise UserError(
                f"protocol {self.name!r} reruns the winner of a search on other splits, so it must "
                "search on one: set trials to 1"
            )
        for key, known in (("space", spaces), ("selection", SELECTIONS)):
            for name in self._values(key):
                if name not in known:
                    raise UserError(unknown(f"{key} of protocol {self.name!r}:", name, known))

    def _values(self, key: str) -> list[Any]:
        rule = self.rules.get(key)
        return [] if rule is None else [rule.value, *rule.datasets.values(), *rule.others]

    def to_json(self) -> dict[str, Any]:
        """The protocol as plain values, as sweeps store it."""
        facts = asdict(self)
        for rule in facts["rules"].values():
            rule["others"] = list(rule["others"])
        return facts


def _shipped() -> Iterable[Protocol]:
    from . import domainbed, fad, quick, yu2024

    return [module.PROTOCOL for module in (domainbed, fad, yu2024, quick)]


protocols = Registry("protocol", _shipped)


def register_protocol(protocol: Protocol) -> Protocol:
    """Add a protocol of your own, in a module that you pass to ``--plugin``."""
    return protocols.add(protocol)
