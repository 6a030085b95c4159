"""`steppe list`: the entries of every axis, with cost, citation and options."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from steppe.algorithms.registry import algorithms
from steppe.averaging.registry import averages
from steppe.axes import AxisSpec
from steppe.domains.catalog import DATASETS
from steppe.errors import UserError, shown
from steppe.optim.registry import OptimizerSpec, optimizers
from steppe.options import Option
from steppe.paper.experiment import EXPERIMENTS
from steppe.protocols.protocol import protocols
from steppe.registry import Registry
from steppe.strangers import printable
from steppe.training.recipes import Recipe, recipes
from steppe.training.zoo import BACKBONES, timm_facts

from .common import Json, Plugins

MATCHES = 40
"""Maximum number of timm names to show."""
_SHARED = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "momentum": "momentum of SGD",
}
"""Meanings of the options that optimizers share."""
Facts = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A list of named entries.

    Attributes:
        name: the list's name.
        axis: the config key that takes an entry's name, if any.
        registry: the entries.
        facts: returns an entry's facts: name, summary and citation first.
        columns: the facts that the table shows, with their headings.
        hint: how to use a name.
        numbers: how many of the last columns are numbers.
    """

    name: str
    axis: str
    registry: Registry[Any]
    facts: Callable[[Any], Facts]
    columns: Mapping[str, str]
    hint: str
    numbers: int = 0


def _options(spec: AxisSpec) -> dict[str, Facts]:
    # The other options describe their values in their meanings.
    others = {name: _told(one) | {"values": None} for name, one in spec.further.items()}
    return {**{name: _told(option) for name, option in spec.options.items()}, **others}


def _told(option: Option) -> Facts:
    return {
        "default": option.default,
        "values": option.expected,
        "search": None if option.search is None else _plain(str(option.search)),
        "meaning": _plain(option.meaning.rstrip(".")),
    }


def _plain(text: str) -> str:
    r"""Remove code and math markup from a docstring's text.

    Examples:
        >>> _plain(r"direction $g_0 + \alpha\,(g_3 - g_2)$ within `rho`")
        'direction g_0 + alpha (g_3 - g_2) within rho'
    """
    text = re.sub(r"\\,\s*", " ", re.sub(r"\\[()]|[$`]", "", text))
    return re.sub(r"\\(\w+)", r"\1", text)


def _axis(spec: AxisSpec) -> Facts:
    return {"name": spec.name, "summary": _plain(spec.summary), "citation": spec.citation}


def _optimizer(spec: OptimizerSpec) -> Facts:
    own, shared = _options(spec), {}
    scratch = spec.defaults(pretrained=False)
    for name, hyper in spec.space().items():
        if name not in spec.options:
            meaning = _SHARED[name]
            if scratch[name] != hyper.default:
                meaning += f"; {scratch[name]:g} from scratch (--weights none)"
            shared[name] = _told(Option(hyper.distribution, default=hyper.default, meaning=meaning))
    inner = spec.base or (spec.target if spec.source != "steppe" else "")
    return {
        **_axis(spec),
        "passes": spec.passes,
        "hessian_products": spec.hessian_products,
        "options": {**shared, **{name: one for name, one in own.items() if name not in shared}},
        "others": str(inner).replace(":", "."),
    }


def _algorithm(spec: Any) -> Facts:
    own = {"cost": spec.cost, "min_domains": spec.min_domains}
    options = {name: _told(option) for name, option in spec.options.items()}
    return {**_axis(spec), **own, "options": options}


def _averaging(spec: AxisSpec) -> Facts:
    return {
        **_axis(spec),
        "options": {name: _told(option) for name, option in spec.options.items()},
    }


def _dataset(spec: Any) -> Facts:
    images = sum(spec.counts) if spec.counts else None
    return {
        "name": spec.name,
        "summary": ", ".join(spec.domains),
        "citation": spec.citation,
        "classes": spec.n_classes,
        "images": images,
        "steps": spec.steps,
        "backbone": spec.backbone,
        "image_size": spec.image_size,
    }


def _backbone(spec: Any) -> Facts:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "citation": spec.citation,
        "library": spec.library,
        "parameters": spec.parameters,
    }


def _recipe(spec: Recipe) -> Facts:
    own = {**spec.settings, **spec.pretrained}
    plain = {
        f"{key}.{name}".removesuffix(".name"): value
        for key, values in own.items()
        for name, value in (values if isinstance(values, Mapping) else {"name": values}).items()
    }
    return {
        "name": spec.name,
        "summary": spec.summary,
        "citation": spec.citation,
        "settings": [f"{key}={_cell(value)}" for key, value in plain.items()],
    }


def _experiment(spec: Any) -> Facts:
    return {
        "name": spec.name,
        "summary": spec.about,
        "citation": f"the FAD paper, {spec.label}" if spec.label else "",
        "datasets": list(spec.datasets),
        "optimizers": list(spec.optimizers),
    }


def _protocol(spec: Any) -> Facts:
    return {"name": spec.name, "summary": spec.about, "citation": spec.citation}


_NAMED = {"name": "name", "summary": "what it does", "citation": "citation"}
KINDS = Registry(
    "list",
    lambda: (
        Kind(
            "optimizers",
            "optimizer",
            optimizers,
            _optimizer,
            {**_NAMED, "passes": "passes per step", "hessian_products": "Hessian products"},
            "steppe train --optimizer NAME",
            numbers=2,
        ),
        Kind(
            "algorithms",
            "algorithm",
            algorithms,
            _algorithm,
            {**_NAMED, "cost": "step time relative to ERM", "min_domains": "source domains needed"},
            "steppe train --algorithm NAME",
            numbers=2,
        ),
        Kind(
            "averaging",
            "averaging",
            averages,
            _averaging,
            _NAMED,
            "steppe train --averaging NAME",
        ),
        Kind(
            "datasets",
            "dataset",
            DATASETS,
            _dataset,
            {
                **_NAMED,
                "summary": "domains",
                "classes": "classes",
                "images": "images",
                "steps": "steps",
            },
            "steppe train --dataset NAME ('steppe data list' shows which are on this machine)",
            numbers=3,
        ),
        Kind(
            "backbones",
            "backbone",
            BACKBONES,
            _backbone,
            {**_NAMED, "library": "library", "parameters": "parameters"},
            "steppe train --backbone NAME ('steppe list backbones TEXT' searches timm, which has "
            "many more)",
            numbers=1,
        ),
        Kind(
            "recipes",
            "recipe",
            recipes,
            _recipe,
            {**_NAMED, "settings": "settings"},
            "steppe train --recipe NAME",
        ),
        Kind(
            "experiments",
            "",
            EXPERIMENTS,
            _experiment,
            {**_NAMED, "summary": "what it shows", "datasets": "datasets"},
            "steppe reproduce NAME ('--plan' adds its number of runs)",
        ),
        Kind(
            "protocols",
            "",
            protocols,
            _protocol,
            {**_NAMED, "summary": "what distinguishes it"},
            "steppe sweep plan DIR --protocol NAME --datasets ... ('steppe protocol show NAME' "
            "has all that it fixes)",
        ),
    ),
)


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="optimizers, algorithms, averaging, datasets, backbones, recipes, experiments or "
            "protocols (default: show the number of each).",
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Entry to show with its options (default: all)."),
    ] = "",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List optimizers, algorithms, datasets and more, or show the options of one entry."""
    if not kind:
        counts = {one.name: len(one.registry) for one in KINDS.entries()}
        if as_json:
            print(json.dumps(counts, indent=2))
            return
        for word, count in counts.items():
            print(f"{count:>3} {word:12} steppe list {word}")
        return
    if kind not in KINDS:
        _point_to(kind)
    chosen = KINDS[kind]
    if name:
        _show_one(chosen, name, as_json)
    else:
        show_all(chosen, as_json)


def _point_to(name: str) -> None:
    """If the user passed an entry's name instead of a kind, say where it is listed."""
    kinds = reversed([*KINDS.entries()])  # of several lists with a name, the first
    listed = {entry.lower(): (kind, entry) for kind in kinds for entry in kind.registry}
    close = difflib.get_close_matches(name.lower(), [*KINDS, *listed], n=1)
    if not close or close[0] in KINDS:
        return
    kind, entry = listed[close[0]]
    where = f"is listed under {kind.name}: steppe list {kind.name} {entry}"
    if name.lower() == entry.lower():
        raise UserError(f"{name!r} {where}")
    raise UserError(f"unknown list {shown(name)}, did you mean {entry!r}? It {where}")


def show_all(kind: Kind, as_json: bool = False) -> None:
    rows = [kind.facts(entry) for entry in kind.registry.entries()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from steppe.console import stdout

    if stdout().is_terminal:  # the whole table is wider than most terminals
        rows = [row | {"citation": short_citation(row["citation"])} for row in rows]
    cells = [[_cell(row[key]) for key in kind.columns] for row in rows]
    _table([*kind.columns.values()], cells, kind.numbers)
    print(f"Use one: {kind.hint}")
    if rows and "options" in rows[0]:
        print(f"Its options: steppe list {kind.name} NAME")


def short_citation(text: str) -> str:
    """Authors, venue and year, without the title and remarks.

    Examples:
        >>> short_citation("Foret et al., Sharpness-Aware Minimization, ICLR 2021")
        'Foret et al., ICLR 2021'
        >>> short_citation("Wang et al., Domain Mixup, ICASSP 2020; Zhang et al., mixup, ICLR 2018")
        'Wang et al., ICASSP 2020; Zhang et al., ICLR 2018'
    """
    works = [re.sub(r" \([^)]*\)$", "", work).split(", ") for work in text.split("; ")]
    return "; ".join(", ".join(dict.fromkeys((work[0], work[-1]))) for work in works)


def _show_one(kind: Kind, name: str, as_json: bool) -> None:
    if kind.name == "backbones" and name not in kind.registry:
        _search_timm(name, as_json)
        return
    facts = kind.facts(kind.registry[name])
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    _print_one(kind, facts)


def _print_one(kind: Kind, facts: Facts) -> None:
    options, others = facts.pop("options", {}), facts.pop("others", "")
    headings = {
        **kind.columns,
        "image_size": "image size",
        "fixed_size": "sets the default of --image-size",
        "head_outputs": "outputs of its own head",
        "pretrained": "pretrained weights",
    }
    print(printable(f"{facts.pop('name')}: {facts.pop('summary')}"))
    for key, value in facts.items():
        if value not in ("", None):
            print(printable(f"{headings.get(key, key)}: {_cell(value)}"))
    if options:
        rows = []
        for key, option in options.items():
            if option["default"] is None and option["search"]:
                option["default"] = "the optimizer's"
            rows.append([f"{kind.axis}.{key}", *(_cell(option[fact]) for fact in _OPTION)])
        _table(["option", *_OPTION.values()], rows)
        print(f"Set one: steppe train ... --set {rows[0][0]}={rows[0][1]}")
    elif kind.axis in ("algorithm", "averaging"):
        print("It has no options.")
    if others:
        print(f"You can also set the other options of {others}.")


_OPTION = {
    "default": "default",
    "values": "values",
    "search": "search draws from",
    "meaning": "meaning",
}


def _timm_facts(name: str) -> Facts | None:
    """A timm model's own preprocessing and head; None if timm has no such model."""
    if (known := timm_facts(name)) is None:
        return None
    return {
        "image_size": known.input_size[-1],
        "fixed_size": known.fixed_input_size,
        "mean": list(known.mean),
        "std": list(known.std),
        "head_outputs": known.num_classes,
    }


def _search_timm(text: str, as_json: bool) -> None:
    import timm

    found, facts = timm.list_models(f"*{text}*"), _timm_facts(text)
    if facts is not None:
        found = [text, *(name for name in found if name != text)]
    if not found:
        known = ", ".join(BACKBONES)
        raise UserError(f"no backbone name contains {text!r}. Known: {known}, and timm's")
    tagged = timm.list_models(f"*{text}*", pretrained=True)  # as in vit_small_patch16_224.dino
    trained = {*tagged, *(name.partition(".")[0] for name in tagged)}
    rows: list[Facts]
    rows = [{"name": name, "library": "timm", "pretrained": name in trained} for name in found]
    if facts is not None:
        rows[0] |= facts
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if facts is not None:
        _print_one(KINDS["backbones"], {**rows[0], "summary": "a timm model"})
        own = [name for name in tagged if name.startswith(f"{text}.")]
        if own:
            print(f"names with weights: {', '.join(own)}")
        del rows[0], found[0]
        if not found:
            return
    shown = [[name, "yes" if name in trained else "no"] for name in found[:MATCHES]]
    _table(["timm backbone", "pretrained weights"], shown)
    if len(rows) > MATCHES:
        print(f"and {len(rows) - MATCHES:,} more: narrow the search, or use --json")


def _table(headings: list[str], rows: list[list[str]], numbers: int = 0) -> None:
    from steppe.console import Text, printed, stdout, table

    made = table(headings, rows, labels=len(headings) - numbers, plain=True)
    made.columns[0].no_wrap = True  # so that users can copy it
    console = stdout()
    if console.is_terminal:
        for place in range(len(headings) - numbers, len(headings)):
            # A word per line, because the numbers are narrow.
            made.columns[place].header = Text("\n".join(headings[place].split()))
        console.print(made)
    else:
        print(printed([made]), end="")  # one line per entry, for programs such as grep


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "" if value is None else str(value)
