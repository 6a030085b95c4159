"""`steppe data`: datasets."""

import json
from typing import Annotated

import typer

from steppe.console import stderr, stdout
from steppe.strangers import command, printable

from .common import Json, Plugins, Root

app = typer.Typer(help="List, download, check and pack datasets.")
_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Dataset name or folder DOMAIN/CLASS/IMAGE.")
]
_Jobs = Annotated[
    int | None, typer.Option(min=1, help="Decoding processes (default: one per core).")
]


@app.command("list")
def data_list(
    root: Root = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List all datasets, and which of them are on this machine."""
    from steppe.domains import data_folder, listing

    rows = listing.find_all(root or data_folder())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    stdout().print(listing.table(rows))
    print("Add --json for their folders. Download one with 'steppe data get NAME'.")


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Dataset name.")],
    root: Root = None,
    plugin: Plugins = None,
) -> None:
    """Download and unpack a dataset, resuming an interrupted download."""
    from steppe.domains import data_folder, dataset_spec
    from steppe.domains.get import get

    folder = get(dataset_spec(name), root or data_folder(), console=stderr())
    where = ("--root", root) if root else ()
    check = command("steppe", "data", "check", name, *where)
    print(printable(f"{folder}: check it with: {check}"))


@app.command("check")
def data_check(
    name: _Name,
    root: Root = None,
    jobs: _Jobs = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Check a dataset's layout, image counts and every image; exit with 1 on any problem."""
    from steppe.domains import check, data_folder, dataset_spec

    home = root or data_folder()
    report = check.check(dataset_spec(name), home, jobs=jobs, console=stderr())
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        stdout().print(*check.tables(report), sep="\n", soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


@app.command("pack")
def data_pack(
    name: _Name,
    size: Annotated[
        int, typer.Option(min=1, help="Shrink larger images to a shorter side of this many pixels.")
    ] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing pack.")] = False,
    root: Root = None,
    jobs: _Jobs = None,
    plugin: Plugins = None,
) -> None:
    """Decode every image once, into memory-mapped files that later runs read."""
    from steppe.domains import data_folder, load, packing

    home = root or data_folder()
    dataset = load(name, home, packed=False)
    path = packing.make(dataset, home, size, force=force, jobs=jobs, console=stderr())
    print(printable(f"{path}: written; runs on {dataset.spec.name} use it from now on"))
