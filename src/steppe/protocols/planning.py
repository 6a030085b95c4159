"""Plan the runs of a protocol, and refuse options that contradict it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from steppe.domains import DatasetSpec, dataset_spec, import_plugins
from steppe.errors import UserError, shown
from steppe.sweeps import Grid, Sweep, jobs, target_sets, write_plan
from steppe.training import RunConfig, draw_hparams
from steppe.training.complete import apply_overrides
from steppe.training.config import MACHINE, keys

from .protocol import OWN, PLAN, Protocol, Rule, protocols
from .winners import plan_winners

_GRID = PLAN.keys() - {"selection", "reruns"}


def plan(
    name: str,
    grid: Mapping[str, Any],
    path: Path,
    *,
    retries: int | None = None,
    command: str = "",
    extend: bool = False,
) -> Sweep:
    """Plan a protocol's runs as a sweep, which stores the protocol.

    Args:
        name: the protocol.
        grid: fields of `steppe.sweeps.Grid`, such as `datasets` and `optimizers`. Values that the
            protocol fixes need not be given.
        path: the sweep's folder.
        retries: how often to retry a failed run (default: once).
        command: the command line, for the record.
        extend: add to an existing plan, including the winners of finished searches.

    Raises:
        UserError: the options contradict the protocol, or the sweep follows another one.
    """
    import_plugins(grid.get("options", {}).get("plugins", ()))
    protocol = protocols[name]
    sweep = write_plan(
        grids(protocol, grid),
        path,
        retries=retries,
        command=command,
        extend=extend,
        protocol=protocol.to_json(),
    )
    return plan_winners(path)[0] if extend else sweep


def grids(protocol: Protocol, grid: Mapping[str, Any]) -> list[Grid]:
    """The grids of a protocol, one per dataset.

    Args:
        protocol: the protocol.
        grid: fields of `steppe.sweeps.Grid` that the user asked for.

    Raises:
        UserError: a field, option or override contradicts the protocol.
    """
    return [_grid(protocol, dataset_spec(name), grid) for name in grid["datasets"]]


def _grid(protocol: Protocol, spec: DatasetSpec, given: Mapping[str, Any]) -> Grid:
    """The grid of one dataset."""
    chosen = dict(given)
    for key in _GRID & protocol.rules.keys():
        rule = protocol.rules[key]
        if key in given and given[key] != rule.of(spec.name) and not rule.offers(given[key]):
            raise _contradiction(protocol, key, given[key], rule.of(spec.name), spec)
        chosen.setdefault(key, rule.of(spec.name))
    options, overrides = chosen.pop("options", {}), tuple(chosen.pop("overrides", ()))
    asked = apply_overrides(options, overrides)
    fixed = _fixed(protocol, spec, asked)
    names = keys(MACHINE) | {"plugins"}
    neutral = {key: value for key, value in asked.items() if key in names}
    bare = Grid(**{**chosen, "datasets": (spec.name,), "options": {**neutral, **fixed}})
    whole = replace(bare, options={**fixed, **options}, overrides=overrides)
    if asked.keys() - neutral.keys():
        for ours, theirs in zip(_samples(bare), _samples(whole), strict=True):
            _compare(protocol, spec, whole.space, ours, theirs)
    return whole


def _fixed(protocol: Protocol, spec: DatasetSpec, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The config keys that a protocol fixes, with the values that it lets users choose."""
    found = {}
    for key, rule in protocol.rules.items():
        if key in PLAN:
            continue
        if key in asked and rule.offers(asked[key]):
            found[key] = asked[key]
        elif rule.of(spec.name) is None:
            option = "--" + key.replace("_", "-")
            if key in asked:
                raise _contradiction(protocol, key, asked[key], None, spec)
            raise UserError(
                f"the protocol {protocol.name!r} needs {option}: {_either(rule)} ({rule.source})"
            )
        elif rule.of(spec.name) != OWN:
            found[key] = rule.of(spec.name)
    return found


def _samples(grid: Grid) -> Iterable[RunConfig]:
    """Configs of a grid that have all of its methods, and no more samples than necessary."""
    first = target_sets(dataset_spec(grid.datasets[0]), grid.targets)[0]
    small = replace(grid, trials=1, draws=min(grid.draws, 2), targets="+".join(first))
    return [config for _, config in jobs(small)]


def _compare(
    protocol: Protocol, spec: DatasetSpec, space: str, ours: RunConfig, theirs: RunConfig
) -> None:
    """Raise an error if the user's options change what the protocol fixes or draws."""
    for key in protocol.rules.keys() - PLAN.keys():
        if getattr(ours, key) != getattr(theirs, key):
            raise _contradiction(protocol, key, getattr(theirs, key), getattr(ours, key), spec)
    if "space" not in protocol.rules:
        return
    drawn = draw_hparams(spec, ours.optimizer.name, space, 0, 0, ours.algorithm.name)
    for axis, values in drawn.items():
        for key in values if isinstance(values, Mapping) else ("",):
            found = [_value(config, axis, key) for config in (ours, theirs)]
            if found[0] != found[1]:
                name = f"{axis}.{key}".rstrip(".")
                raise UserError(
                    f"{name}={shown(found[1])} contradicts the protocol {protocol.name!r}, whose "
                    f"search space {space!r} sets {name}: leave it out, or plan without --protocol"
                )


def _value(config: RunConfig, axis: str, key: str) -> Any:
    found = getattr(config, axis)
    if not key:
        return found
    return found.name if key == "name" else found.options.get(key)


def _contradiction(
    protocol: Protocol, key: str, value: Any, fixed: Any, spec: DatasetSpec
) -> UserError:
    rule = protocol.rules[key]
    values = ("" if fixed is None else shown(fixed), _either(rule))
    allowed = " or ".join(filter(None, values))
    remedy = "choose one of these" if fixed is None else "leave it out"
    return UserError(
        f"{key}={shown(value)} contradicts the protocol {protocol.name!r}, which fixes "
        f"{key}={allowed} for {Path(spec.name).name} ({rule.source}): {remedy}, or plan "
        "without --protocol"
    )


def _either(rule: Rule) -> str:
    return " or ".join(map(str, rule.others))
