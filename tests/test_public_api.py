"""The public names, their parameters and members, against a stored listing: a change is deliberate.

To renew the listing, run ``python tests/test_public_api.py > tests/public_api.txt`` and look at the
difference: what is removed or renamed there breaks someone's program.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
LISTING = Path(__file__).with_name("public_api.txt")
RENEW = "python tests/test_public_api.py > tests/public_api.txt"
INTERNAL = {"steppe.cli", "steppe.console"}
"""For `steppe` commands only."""
LAZY = {"TYPE_CHECKING", "attach"}
"""What a package with lazy names imports besides them."""


def listing() -> list[str]:
    """A line for each public name of a package, or of a framework's module."""
    package = griffe.load("steppe", search_paths=[ROOT / "src"])
    modules = [m for m in package.modules.values() if m.is_init_module or m.name == "errors"]
    modules += package["integrations"].modules.values()
    lines = []
    for module in modules:
        if module.path not in INTERNAL and not module.name.startswith("_"):
            lines += [describe(f"{module.path}.{name}", module[name]) for name in names(module)]
    return sorted(lines)


def names(module: griffe.Object) -> Iterator[str]:
    lazy = "attach" in module.members
    if module.exports is not None and not lazy:
        yield from map(str, module.exports)
        return
    if lazy:
        yield from (n for n, m in module.members.items() if m.is_alias and n not in LAZY)
        return
    for name, member in module.members.items():
        if member.is_alias or not public(name):
            continue
        # Of the errors, the exceptions: what makes their messages is for steppe alone.
        if member.is_class or (member.is_function and module.name != "errors"):
            yield name


def public(name: str) -> bool:
    return not name.startswith("_")


def describe(path: str, found: griffe.Object | griffe.Alias) -> str:
    """What a program can rely on: parameters with their defaults, and names of members."""
    value = found.final_target if isinstance(found, griffe.Alias) else found
    if value.is_function:
        return path + parameters(value)
    if not value.is_class:  # a constant, an alias of types or a module
        return path
    members = sorted(filter(public, value.all_members))
    return f"class {path}{parameters(value)}: {', '.join(members)}"


def parameters(value: griffe.Object) -> str:
    """As they are written, without types."""
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    parts, named = [], False
    for one in value.parameters:
        if one.name == "self" or not public(one.name):
            continue
        if one.kind is kinds.keyword_only and not named and not any("*" in part for part in parts):
            parts.append("*")
        named = named or one.kind is kinds.keyword_only
        default = "" if one.default is None or one.kind in stars else f"={one.default}"
        parts.append(f"{stars.get(one.kind, '')}{one.name}{default}")
    return f"({', '.join(parts)})"


def test_the_public_names_are_the_listed_ones():
    stored = LISTING.read_text(encoding="utf-8").splitlines()
    difference = list(difflib.unified_diff(stored, listing(), "listed", "found", "", "", 0))
    assert not difference, (
        "the public API has changed. If that is meant, tell its users in CHANGELOG.md and renew "
        f"the listing with\n\n    {RENEW}\n\n" + "\n".join(difference)
    )


if __name__ == "__main__":
    print("\n".join(listing()))
