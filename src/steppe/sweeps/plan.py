"""Plan a sweep: every run of a grid gets a folder with its full config."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from steppe import __version__
from steppe.algorithms import algorithm_spec
from steppe.averaging import averaging_spec
from steppe.domains import DatasetSpec, dataset_spec, import_plugins, seed_hash
from steppe.durable import full_disk_explained, replace
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_spec
from steppe.registry import Entry
from steppe.sealed import seal
from steppe.search import DEFAULT_SPACE, get_space
from steppe.training import RunConfig, configure, read_config
from steppe.training.complete import redraw

from .sweep import AXES, FILE, VERSION, Sweep, read_plan

RETRIES = 1
_AGAIN = "plan again"


@dataclass(frozen=True)
class Grid:
    """A grid of runs: one for every combination.

    Attributes:
        datasets: names, or folders DOMAIN/CLASS/IMAGE.
        algorithms: comma-separated names; see 'steppe list algorithms'.
        optimizers: comma-separated names; see 'steppe list optimizers'.
        averaging: comma-separated names; see 'steppe list averaging'.
        trials: number of trial seeds, which set the train/validation splits.
        first_trial: the first of them; the others follow it.
        draws: hyperparameter samples per method; sample 0 is the space's defaults. 0 uses the
            settings of 'steppe train'.
        default_draw: whether the samples start with sample 0. Otherwise they start with sample 1.
        targets: held-out domains: `single` holds out each target of the dataset, `pairs` also each
            target with one more domain, which leave-one-out selection needs. Or comma-separated
            domains, each held out alone; join several with ``+`` to hold them out together.
        space: search space for defaults and samples: fair (tuned per optimizer), fad (the paper's),
            domainbed or yu2024.
        overrides: ``key=value`` settings for every run.
        options: other config keys for every run, such as `root`.
        tag: suffix of the runs' names, so that a sweep can have several grids of the same axes.
    """

    datasets: tuple[str, ...]
    algorithms: tuple[str, ...] = ("ERM",)
    optimizers: tuple[str, ...] = ("adam",)
    averaging: tuple[str, ...] = ("none",)
    trials: int = 3
    draws: int = 20
    targets: str = "single"
    space: str = DEFAULT_SPACE
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tag: str = ""
    default_draw: bool = True
    first_trial: int = 0


def target_sets(spec: DatasetSpec, targets: str) -> list[tuple[str, ...]]:
    """The sets of target domains that a sweep holds out, in a fixed order.

    Examples:
        >>> len(target_sets(dataset_spec("PACS"), "single"))
        4
        >>> target_sets(dataset_spec("PACS"), "pairs")[4]
        ('art_painting', 'cartoon')
        >>> len(target_sets(dataset_spec("PACS"), "pairs"))
        10
        >>> target_sets(dataset_spec("PACS"), "sketch,photo+cartoon")
        [('sketch',), ('cartoon', 'photo')]
    """
    if targets in ("single", "pairs"):
        sets = [frozenset(held_out) for held_out in spec.targets]
    elif targets in spec.domains:  # also one whose name contains a separator, such as +90%
        sets = [frozenset((targets,))]
    else:
        given = [name.strip() for name in targets.split(",") if name.strip()]
        sets = [frozenset(name.split("+")) for name in given]
        for domain in frozenset().union(*sets):
            if domain not in spec.domains:
                raise UserError(unknown(f"target of {spec.name}:", domain, spec.domains))
    if targets == "pairs":
        sets += [held_out | {d} for held_out in sets for d in spec.domains if d not in held_out]
    if any(len(held_out) >= len(spec.domains) for held_out in sets):
        raise UserError(
            f"targets {targets!r} would leave no domain of {spec.name} to train on: it has "
            f"{len(spec.domains)}"
        )
    unique = dict.fromkeys(sets)
    return [tuple(d for d in spec.domains if d in held_out) for held_out in unique]


def jobs(grid: Grid) -> Iterator[tuple[str, RunConfig]]:
    """The runs of a grid, each with a readable name and its config.

    Seeds are DomainBed's: a hash of dataset, algorithm, targets, draw and trial. The hash leaves
    out optimizer and averaging, so that runs that differ only in these are paired.
    """
    import_plugins(grid.options.get("plugins", ()))
    get_space(grid.space)
    algorithms = _known(grid.algorithms, algorithm_spec)
    optimizers = _known(grid.optimizers, optimizer_spec)
    averaging = _known(grid.averaging, averaging_spec)
    _known(grid.datasets, dataset_spec)
    for dataset in grid.datasets:
        spec = dataset_spec(dataset)
        axes = product(
            range(grid.first_trial, grid.first_trial + grid.trials),
            algorithms,
            optimizers,
            averaging,
            target_sets(spec, grid.targets),
        )
        for trial, algorithm, optimizer, average, held_out in axes:
            values = {
                **grid.options,
                "dataset": dataset,
                "targets": held_out,
                "algorithm": algorithm,
                "optimizer": optimizer,
                "averaging": average,
                "trial_seed": trial,
                "seed": _seed(spec, algorithm, held_out, 0, trial),
                "space": grid.space,
            }
            if average == "none" and ("recipe" in grid.options or _sets(grid, "recipe")):
                del values["averaging"]  # the recipe's
            config = configure(values, grid.overrides)
            if not grid.draws:
                yield _name(config, grid.tag), config
            first = 0 if grid.default_draw else 1
            for draw in range(first, first + grid.draws):
                seed = _seed(spec, algorithm, held_out, draw, trial)
                drawn = redraw(config, draw, {**values, "seed": seed}, grid.overrides)
                yield _name(drawn, grid.tag), drawn


def _seed(spec: DatasetSpec, algorithm: str, held_out: Sequence[str], draw: int, trial: int) -> int:
    numbers = [spec.domains.index(domain) for domain in held_out]
    return seed_hash(spec.name, algorithm, numbers, draw, trial)


def on_trial(config: RunConfig, trial: int) -> RunConfig:
    """A run's hyperparameters on the split of another trial, with the seed of its place there."""
    import_plugins(config.plugins)
    seed = _seed(config.spec(), config.algorithm.name, config.targets, config.draw or 0, trial)
    return config.model_copy(update={"trial_seed": trial, "seed": seed})


def _sets(grid: Grid, key: str) -> bool:
    return any(text.partition("=")[0].strip() == key for text in grid.overrides)


def _known(names: Sequence[str], find: Callable[[str], Entry]) -> list[str]:
    found = [find(name).name for name in names]
    for name in found:
        if found.count(name) > 1:
            raise UserError(f"{name!r} is listed twice: remove one")
    if not found:
        raise UserError(
            "a sweep needs at least one dataset, algorithm, optimizer and averaging, got an empty "
            "list"
        )
    return found


def _axes(config: RunConfig) -> dict[str, Any]:
    return {
        "dataset": Path(config.dataset).name,
        "targets": "+".join(config.targets),
        "algorithm": config.algorithm.name,
        "optimizer": config.optimizer.name,
        "averaging": config.averaging.name,
        "trial": config.trial_seed,
        "draw": config.draw,
        "steps": config.steps * (2 if config.second_stage else 1),
    }


def _name(config: RunConfig, tag: str) -> str:
    axes = _axes(config)
    parts = [*(str(axes[axis]) for axis in AXES), f"trial{axes['trial']}"]
    parts += [] if config.draw is None else [f"draw{config.draw}"]
    parts += [tag] if tag else []
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def write_plan(
    grid: Grid | Sequence[Grid],
    path: Path,
    *,
    retries: int | None = None,
    command: str = "",
    extend: bool = False,
    protocol: Mapping[str, Any] | None = None,
) -> Sweep:
    """Write a plan: `sweep.json`, and a folder with `config.json` for every run.

    Args:
        grid: the runs; several grids must not share a run name.
        path: the sweep's folder.
        retries: how often to retry a failed run (default: once).
        command: the command line, for the record.
        extend: add to an existing plan; its runs stay as they are.
        protocol: the protocol that the runs follow, as plain values. A sweep has at most one.
    """
    old = _plan_so_far(path, extend)
    _check_protocol(old, protocol)
    seen: set[str] = set()
    new = _New(path, old)
    used = []
    for one in [grid] if isinstance(grid, Grid) else grid:
        before = len(new.configs)
        for name, config in jobs(one):
            if name in seen:
                raise UserError(f"two runs would be named {name}: plan them in separate sweeps")
            seen.add(name)
            new.add(name, config, one.tag)
        used += [asdict(one)] if len(new.configs) > before else []
    if old.axes and not new.configs and retries in (None, old.retries):
        return old
    commands = old.facts["commands"]
    return new.write(
        grids=[*old.facts["grids"], *used],
        commands=commands if commands[-1:] == [command] else [*commands, command],
        retries=old.retries if retries is None else retries,
        **({} if protocol is None else {"protocol": protocol}),
    )


def rerun(sweep: Sweep, names: Iterable[str], trials: Sequence[int]) -> Sweep:
    """Add runs of a sweep to its plan again, with the same hyperparameters on other trials."""
    new = _New(sweep.path, sweep)
    for name in names:
        config, tag = read_config(sweep.folder(name) / "config.json"), sweep.axes[name].get("tag")
        for trial in trials:
            moved = on_trial(config, trial)
            new.add(_name(moved, tag or ""), moved, tag or "")
    return new.write() if new.configs else sweep


class _New:
    """Runs to add to a plan."""

    def __init__(self, path: Path, old: Sweep) -> None:
        self.path, self.old = path, old
        self.configs: dict[str, RunConfig] = {}
        self.axes: dict[str, Any] = {}

    def add(self, name: str, config: RunConfig, tag: str) -> None:
        """Add a run, unless the plan has it."""
        if name in self.old.axes:
            _check_same(self.path, name, config)
        else:
            self.configs[name], self.axes[name] = config, {**_axes(config), "tag": tag}

    def write(self, **changes: Any) -> Sweep:
        """Write the runs' folders, then the plan."""
        with full_disk_explained(self.path, _AGAIN):
            (self.path / "runs").mkdir(parents=True, exist_ok=True)
        for name, config in self.configs.items():
            _write_config(self.path, name, config)
        os.sync()  # once: syncing thousands of files one by one would take minutes
        own = {"version": VERSION, "steppe": __version__, "retries": self.old.retries}
        facts = {**self.old.facts, **own, **changes}
        file = self.path / FILE
        with full_disk_explained(file, _AGAIN):  # last, so that an interrupted plan is not one
            replace(file, seal(_text(facts, {**self.old.axes, **self.axes})) + b"\n")
        return read_plan(self.path)


def _check_protocol(old: Sweep, protocol: Mapping[str, Any] | None) -> None:
    """Raise an error if a sweep would have runs of two protocols, or of one and of none."""
    had = old.facts.get("protocol")
    if not old.axes or had == protocol:
        return
    name, other = (None if one is None else one.get("name") for one in (had, protocol))
    if name == other:
        text = f"{old.path} was planned with another version of the protocol {name!r}"
    else:
        does, should = (f"the protocol {one!r}" if one else "no protocol" for one in (name, other))
        text = f"{old.path} follows {does}, and the new runs would follow {should}"
    raise UserError(f"{text}: plan them in another folder")


def _text(facts: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    """The plan as JSON with a line for each run; indenting all of it takes ten times as long."""
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(place)}" for name, place in runs.items())
    return json.dumps(facts, indent=1).removesuffix("\n}") + f',\n "runs": {{\n  {lines}\n }}\n}}'


def _plan_so_far(path: Path, extend: bool) -> Sweep:
    """The folder's plan, or an empty one."""
    if (path / FILE).exists():
        if not extend:
            raise UserError(
                f"{path} already contains a sweep: pass --extend to add runs to it, choose "
                "another folder, or delete it"
            )
        return read_plan(path)
    # An interrupted plan leaves nothing but runs.
    if path.exists() and any(p.name != "runs" and p.name[0] != "." for p in path.iterdir()):
        raise UserError(f"{path} is not empty and not a sweep: choose another folder")
    return Sweep(path, {}, RETRIES, {"grids": [], "commands": []})


def _check_same(path: Path, name: str, config: RunConfig) -> None:
    """Raise an error if the plan already has this run with other settings."""
    before = read_config(path / "runs" / name / "config.json")
    for key in RunConfig.model_fields:
        labels = key in ("version", "space", "resolved")
        if not labels and getattr(config, key) != getattr(before, key):
            raise UserError(
                f"{path} already has {name}, with {key}={getattr(before, key)} instead of "
                f"{getattr(config, key)}: plan runs with other settings in another folder. If a "
                "default has changed since, pass the old value with --set or --space."
            )


def _write_config(path: Path, name: str, config: RunConfig) -> None:
    folder = path / "runs" / name
    file = folder / "config.json"
    with full_disk_explained(file, _AGAIN):
        try:
            folder.mkdir()
        except FileExistsError:  # left by an interrupted plan
            if folder.is_symlink():
                raise UserError(
                    f"{folder} is a symbolic link: replace it with the folder itself"
                ) from None
            file.unlink(missing_ok=True)  # never follow a link
        with file.open("x") as opened:
            opened.write(config.to_json())
