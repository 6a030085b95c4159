"""`steppe data`: datasets."""

import json
from pathlib import Path
from typing import Annotated

import typer

from steppe.console import stderr, stdout
from steppe.strangers import command, printable

from .common import JSON, PLUGINS, ROOT

app = typer.Typer(help="Datasets: what is known, fetching, checking, packing.")
_NAME = typer.Argument(metavar="NAME", help="A dataset's name, or a folder DOMAIN/CLASS/IMAGE.")
_JOBS = typer.Option("--jobs", min=1, help="Processes that decode; one per core by default.")


@app.command("list")
def data_list(
    root: Annotated[Path | None, ROOT] = None,
    plugin: Annotated[list[str] | None, PLUGINS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the datasets that are known, and where each was found."""
    from steppe.domains import data_folder, import_plugins, listing

    import_plugins(plugin or ())
    rows = listing.find_all(root or data_folder())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    stdout().print(listing.table(rows))
    print("'--json' has where they were found; 'steppe data get NAME' fetches one.")


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset's name.")],
    root: Annotated[Path | None, ROOT] = None,
    plugin: Annotated[list[str] | None, PLUGINS] = None,
) -> None:
    """Download a dataset and lay it out, resuming where an earlier attempt stopped."""
    from steppe.domains import data_folder, dataset_spec, import_plugins
    from steppe.domains.get import get

    import_plugins(plugin or ())
    folder = get(dataset_spec(name), root or data_folder(), console=stderr())
    where = ("--root", root) if root else ()
    check = command("steppe", "data", "check", name, *where)
    print(printable(f"{folder}: check it with: {check}"))


@app.command("check")
def data_check(
    name: Annotated[str, _NAME],
    root: Annotated[Path | None, ROOT] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    plugin: Annotated[list[str] | None, PLUGINS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check a dataset's layout, counts and every image; exit with 1 if anything is wrong."""
    from steppe.domains import check, data_folder, dataset_spec, import_plugins

    import_plugins(plugin or ())
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
    name: Annotated[str, _NAME],
    size: Annotated[
        int, typer.Option(min=1, help="Shrink images whose shorter side is longer.")
    ] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace a pack that is there.")] = False,
    root: Annotated[Path | None, ROOT] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    plugin: Annotated[list[str] | None, PLUGINS] = None,
) -> None:
    """Decode every image once, into memory-mapped files that runs then use."""
    from steppe.domains import data_folder, import_plugins, load, packing

    import_plugins(plugin or ())
    home = root or data_folder()
    dataset = load(name, home, packed=False)
    path = packing.make(dataset, home, size, force=force, jobs=jobs, console=stderr())
    print(printable(f"{path}: runs on {dataset.spec.name} use it from now on"))
