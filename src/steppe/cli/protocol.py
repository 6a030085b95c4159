"""`steppe protocol`: what each protocol fixes, and where that comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.strangers import printable

from .common import Json, Plugins

if TYPE_CHECKING:
    from steppe.protocols import Protocol, Rule

app = typer.Typer(help="Show protocols: what a fair comparison of methods fixes.")


@app.command("list")
def protocol_list(plugin: Plugins = None, as_json: Json = False) -> None:
    """List all protocols."""
    from .listing import KINDS, show_all

    show_all(KINDS["protocols"], as_json)


@app.command("show")
def protocol_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Protocol.")],
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show what a protocol fixes, and where each value comes from."""
    from steppe.console import printed, stdout, table
    from steppe.protocols import protocols

    chosen = protocols[name]
    if as_json:
        print(json.dumps({**chosen.to_json(), "search": _search(chosen)}, indent=2))
        return
    print(printable(f"{chosen.name}: {chosen.about}"))
    for key in ("citation", "code"):
        if value := getattr(chosen, key):
            print(printable(f"{key}: {value}"))
    rows = [(key, _told(rule), rule.source) for key, rule in chosen.rules.items()]
    made = table(("fixes", "value", "where it comes from"), rows, labels=3, plain=True)
    made.columns[0].no_wrap = True
    console = stdout()
    if console.is_terminal:
        console.print(made)
    else:
        print(printed([made]), end="")
    if found := _search(chosen):
        said = ", ".join(f"{key} {value}" for key, value in found.items())
        print(f"The search space samples {said}, and the options that methods declare.")
    if chosen.note:
        print(printable(chosen.note))
    print("You choose: --datasets, --algorithms, --optimizers, --averaging, how runs execute.")
    print(f"Plan it: steppe sweep plan DIR --protocol {chosen.name} --datasets ...")


def _told(rule: Rule) -> str:
    """A rule's values in words."""
    allowed = [*([] if rule.value is None else [rule.value]), *rule.others]
    exceptions = (f"{name}: {_word(value)}" for name, value in rule.datasets.items())
    return "; ".join([" or ".join(map(_word, allowed)), *exceptions])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _search(protocol: Protocol) -> Mapping[str, str]:
    """The distributions of the hyperparameters that all methods share, if samples are drawn."""
    from steppe.search import get_space

    rules = protocol.rules
    if "space" not in rules or ("draws" in rules and not rules["draws"].value):
        return {}
    space = get_space(rules["space"].value)
    found = {
        "lr": space.lr,
        "weight_decay": space.weight_decay,
        "batch_size": space.batch_size,
        "dropout": space.dropout,
    }
    return {
        key: "per optimizer" if hyper is None else str(hyper.distribution)
        for key, hyper in found.items()
    }
