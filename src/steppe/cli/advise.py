"""`steppe advise`: which optimizer fits my data?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.errors import UserError
from steppe.strangers import printable
from steppe.study.advice.extent import PER_GPU
from steppe.study.design import FIXED
from steppe.sweeps import Crew
from steppe.training.config import RunConfig

from .common import Json, talk
from .options import fields, keys, overriding, with_options
from .sweep import VARIED

if TYPE_CHECKING:
    from steppe.study import Advice

_OWN = ("steps", "checkpoint_every", "workers")
"""Config keys that the short runs set themselves, or whose name another option has."""


@with_options(
    crew=[
        *fields(
            Crew,
            "workers",
            min=1,
            help="Number of workers",
            default="one per core, or --per-gpu on each GPU",
        ),
        *fields(Crew, "per_gpu", min=1, default=str(PER_GPU)),
    ],
    options=keys(*(k for k in RunConfig.model_fields if k not in (*VARIED, *FIXED, *_OWN))),
)
def advise(
    crew: dict[str, Any],
    options: dict[str, Any],
    dataset: Annotated[str, typer.Argument(help="Dataset name, or folder DOMAIN/CLASS/IMAGE.")],
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target", help="Domain that you will test on: no image of it is read (default: none)."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for short runs, such as 90s, 4m or 1h.")
    ] = "4m",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the short runs, and resume them (default: delete)."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set any config key of all runs, such as optimizer.weight_decay=0; repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank optimizers for a dataset, after minutes of short runs.

    The runs leave out each source domain in turn. A model that was fitted to small tasks ranks the
    optimizers, and says how well it does on tasks that it has not seen.
    """
    from steppe.console import Meter
    from steppe.study import advise

    if len(set(targets or ())) > 1:
        raise UserError(f"--target takes one domain, got {', '.join(targets or ())}")
    console = talk()
    with Meter("warm-up", console=console) as meter:

        def show(phase: str, done: int, total: int) -> None:
            meter.update(done, total=total, title=phase)

        found = advise(
            dataset,
            target=targets[0] if targets else None,
            budget=_seconds(budget),
            options=options,
            overrides=overriding(options, {}, overrides),
            crew=Crew(**{"per_gpu": PER_GPU, **crew}),
            out=out,
            show=show,
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    _print(found)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise UserError(f"--budget {text}: expected a time, such as 90s, 4m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _print(found: Advice) -> None:
    from steppe.console import stdout, table
    from steppe.study.advice.advising import LEVEL

    measured = ((name, f"{value:.4g}") for name, value in found.indicators.items())
    stdout().print(table(("indicator", "value"), measured))
    interval = f"{100 * LEVEL:.0f}% interval"
    expected = (
        (
            row.optimizer,
            f"{100 * row.probability:.0f}%",
            f"{row.gain:+z.1f}",
            "" if row.optimizer == found.baseline else f"{row.low:+z.1f} to {row.high:+z.1f}",
            f"{row.passes:g}",
            "" if row.rate is None else f"{row.rate:.3g}",
        )
        for row in found.ranking
    )
    over = f"points over\n{found.baseline}"
    head = ("optimizer", "P(best)", over, interval, "passes", "learning rate\n/ default")
    stdout().print(table(head, expected))
    print(printable(found.sentence()))
    for note in found.notes():
        print(printable(f"note: {note}"))
