"""`steppe merge`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from steppe.errors import UserError
from steppe.strangers import printable

from .common import Chosen, Device, Json, Root, talk


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or sweeps.")],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="New run's folder; for sweeps, a folder of new runs."),
    ],
    how: Annotated[
        str,
        typer.Option(
            help="greedy (add runs from the best down, if validation does not fall), uniform (the "
            "mean of all), or wise (WiSE-FT: between one run's initial and final weights).",
        ),
    ] = "greedy",
    alpha: Annotated[
        float | None,
        typer.Option(
            help="WiSE-FT's share of the final weights (default: the best of 0, 0.1, ..., 1 by "
            "validation).",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Run whose weights WiSE-FT starts from (default: the run's initial weights).",
        ),
    ] = None,
    which: Chosen = None,
    root: Root = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Average the weights of finished runs into a new run: soups, DiWA, WiSE-FT.

    Only validation images of the source domains decide what is averaged. In a sweep, runs that
    differ only in the draw are merged.
    """
    from steppe.console import Meter
    from steppe.training.ingredients import plan_merge
    from steppe.training.merge import merge_runs
    from steppe.training.progress import summary

    console, home = talk(), str(root) if root else None
    wanted = _groups(runs, out, how)
    for members in wanted.values():  # before the first is merged
        plan_merge(members, how, alpha, start, which)
    made = []
    for folder, members in wanted.items():
        with Meter("merging", len(members), console=console) as meter:
            merged = merge_runs(
                members,
                folder,
                how=how,
                alpha=alpha,
                start=start,
                which=which,
                device=device,
                root=home,
                meter=meter,
            )
        made.append(merged)
        if not as_json:
            share = "" if merged.alpha is None else f", alpha {merged.alpha:g}"
            what = f"{how}, {len(merged.runs)} of {merged.of} runs{share}"
            print(printable(f"{folder}: {what}: {summary(merged.record)}"))
    if as_json:
        print(json.dumps([merged.to_json() for merged in made], indent=2))


def _groups(runs: list[Path], out: Path, how: str) -> Mapping[Path, list[Path]]:
    """The runs to merge, by the folder of the new run."""
    from steppe.sweeps import read_plan
    from steppe.sweeps.merge import groups
    from steppe.sweeps.sweep import FILE

    planned = [path for path in runs if (path / FILE).exists()]
    if not planned:
        return {out: runs}
    if len(planned) < len(runs):
        raise UserError(
            f"{planned[0]} is a sweep, and others are runs: pass only runs, or only sweeps"
        )
    found = groups([read_plan(path) for path in planned], together=how != "wise")
    return {out / name: members for name, members in found.items()}
