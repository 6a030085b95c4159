"""`steppe study`: claims about methods, run until they are decided."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steppe.durable import replace
from steppe.errors import UserError
from steppe.strangers import command, printable
from steppe.study.design import FIXED
from steppe.sweeps import Crew
from steppe.training.config import RunConfig

from .common import Json, Overrides, remark, writable
from .options import SHORTCUTS, RunCommand, fields, keys, overriding, with_options
from .sweep import VARIED, LauncherName, LauncherPlugins

if TYPE_CHECKING:
    from steppe.study import Method, Study

app = typer.Typer(help="Decide claims about methods: which is better, or does it not matter?")
_Study = Annotated[Path, typer.Argument(metavar="DIR", help="Study folder.")]


@app.command("plan")
@with_options(
    options=keys(*(k for k in RunConfig.model_fields if k not in (*VARIED, *FIXED))),
    shortcuts=SHORTCUTS,
)
def study_plan(
    path: _Study,
    options: dict[str, Any],
    shortcuts: dict[str, Any],
    dataset: Annotated[
        str | None, typer.Option(help="Dataset name, or folder DOMAIN/CLASS/IMAGE.")
    ] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A:B", help="Is A better than B? At most six share the error rate; repeatable."
        ),
    ] = None,
    explore: Annotated[
        list[str] | None,
        typer.Option(metavar="A:B", help="Exploratory claim, which decides nothing; repeatable."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=OPTIMIZER[,KEY=VALUE]",
            help="Method that is more than an optimizer, such as half=fad,steps=501 or "
            "coral=adamw,algorithm=CORAL; repeatable.",
        ),
    ] = None,
    targets: Annotated[
        str,
        typer.Option(help="single (each target), or comma-separated domains, joined by + in sets."),
    ] = "single",
    endpoint: Annotated[
        Literal["average", "raw"],
        typer.Option(help="Compare the moving average of the weights (less noisy), or raw ones."),
    ] = "average",
    selection: Annotated[
        Literal["last", "train-val"],
        typer.Option(help="Compare the last step, or the best on source validation."),
    ] = "last",
    smallest_effect: Annotated[
        float, typer.Option(help="Smallest difference that matters, in points.")
    ] = 1.0,
    alpha: Annotated[float, typer.Option(help="Error rate of all claims together.")] = 0.05,
    power: Annotated[float, typer.Option(help="Power that the forecast is made for.")] = 0.8,
    budget: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Hours of runs (default: no limit).")
    ] = None,
    max_seeds: Annotated[int, typer.Option(min=2, help="Seeds after which a claim ends.")] = 60,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="Tune a setting of every method that has it on seeds of its own, by source "
            "validation; x3 means three times the method's default. Repeatable.",
        ),
    ] = None,
    twins: Annotated[int, typer.Option(min=0, help="Seeds repeated with another rounding.")] = 2,
    pilot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Study whose spread over seeds the forecast uses."),
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Spread over seeds that the forecast assumes, in points."),
    ] = None,
    overrides: Overrides = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add --explore claims to the study in DIR.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Time a pass on this machine to estimate the cost.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Plan a study: its claims, and everything that is fixed before the first run."""
    from steppe import study

    asked = command("steppe", *sys.argv[1:])
    wanted, exploratory = ([_pair(text) for text in given or ()] for given in (claim, explore))
    if extend:
        if wanted or method or tune or budget or dataset or not exploratory:
            raise UserError("--extend adds exploratory claims only: pass --explore A:B")
        made = study.extend_study(path, exploratory, asked)
        print(printable(f"{path}: {len(made.plan.added)} exploratory claims added"))
        return
    if dataset is None or not wanted:
        raise UserError("a study needs --dataset and at least one --claim A:B")
    tuned = [_tuned(text) for text in tune or ()]
    if len(dict(tuned)) < len(tuned):
        raise UserError("--tune names a setting twice: list all its values in one --tune")
    spreads = _spreads(pilot, spread)
    made = study.plan_study(
        path,
        dataset=dataset,
        claims=wanted,
        explore=exploratory,
        methods=[_method(text) for text in method or ()],
        targets=targets,
        tune=dict(tuned),
        command=asked,
        endpoint=endpoint,
        selection=selection,
        smallest_effect=smallest_effect,
        alpha=alpha,
        power=power,
        budget_hours=budget,
        max_seeds=max_seeds,
        twins=twins,
        options=options,
        overrides=tuple(overriding(options, shortcuts, overrides)),
    )
    _show_forecast(made, spreads, estimate, as_json)


def _pair(text: str) -> tuple[str, str]:
    a, colon, b = (part.strip() for part in text.partition(":"))
    if not (a and colon and b):
        raise UserError(f"claim {text!r}: expected two methods, such as fad:adamw")
    return a, b


def _method(text: str) -> Method:
    from steppe.study import Method

    name, equals, rest = text.partition("=")
    optimizer, *settings = (part.strip() for part in rest.split(","))
    if not (name.strip() and equals and optimizer):
        raise UserError(
            f"method {text!r}: expected NAME=OPTIMIZER and settings, such as half=fad,steps=501"
        )
    axes: dict[str, Any] = {"algorithm": "ERM", "averaging": "none"}
    overrides = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"method {text!r}: {setting!r} is not KEY=VALUE")
        if key in axes:
            axes[key] = value
        else:
            overrides.append(setting)
    return Method(name=name.strip(), optimizer=optimizer, overrides=tuple(overrides), **axes)


def _tuned(text: str) -> tuple[str, list[tuple[float, bool]]]:
    key, _, values = text.partition("=")
    try:
        found = [(float(v.removeprefix("x")), v.startswith("x")) for v in values.split(",")]
    except ValueError:
        found = []
    if len(found) < 2:
        raise UserError(
            f"--tune {text}: expected KEY and at least two numbers, such as optimizer.lr=x0.3,x1,x3"
        )
    return key.strip(), found


def _spreads(pilot: Path | None, spread: float | None) -> dict[str, float]:
    from steppe.study.rounds import load_study, spread_of

    found = {} if pilot is None else spread_of(load_study(pilot))
    if pilot is not None and not found:
        raise UserError(f"{pilot} has no claim with three seeds: pass --spread instead")
    if spread is not None:
        if not 0 < spread < 100:
            raise UserError(f"--spread {spread:g}: expected points, more than 0 and below 100")
        found[""] = spread
    return found


def _show_forecast(made: Study, spreads: dict[str, float], estimate: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from steppe.console import stdout, table
    from steppe.study.rounds import needs, timed
    from steppe.study.sequence import first_look

    seconds = timed(made) if estimate else {}
    found = needs(made, spreads, seconds)
    design = made.plan.design
    if as_json:
        values = {
            "study": made.plan.digest,
            "first runs": len(made.state.todo),
            "seconds per run": seconds,
            "needs": [{**asdict(one), "claim": one.claim.name} for one in found],
        }
        print(json.dumps(values, indent=2))
        return
    for name, took in seconds.items():
        print(printable(f"{name}: an estimated {took:,.0f} s per run on this machine"))
    if found:
        d, share = design.smallest_effect, f"{100 * design.power:g}%"
        head = (
            "claim", "spread", f"power for {d:g}", "seeds", "power for 0", "seeds", "hours"
        )  # fmt: skip
        rows = [
            (
                one.claim.name,
                f"{one.spread:.2f}",
                *(
                    cell
                    for f in (one.apart, one.same)
                    for cell in (f"{100 * f.power:.0f}%", _seeds(f.enough, design.max_seeds))
                ),
                "" if one.hours is None else f"{one.hours:,.2f}",
            )
            for one in found
        ]
        stdout().print(table(head, rows))
        print(
            f"Power: probability of a right verdict within {design.max_seeds} seeds if the methods "
            f"differ by {d:g} point{'s' * (d != 1)}, or not at all. Seeds: enough for {share} of "
            "studies."
        )
    else:
        print(
            "No forecast of the seeds that the claims need: pass --pilot STUDY or --spread POINTS."
        )
    if (needed := first_look(design.level)) > design.max_seeds:
        print(
            f"{design.max_seeds} seeds can hardly decide a claim: this is a pilot. A study needs "
            f"--max-seeds {needed} or more."
        )
    first = sum(seconds.get(slot.method, 0.0) for slot in made.state.todo) / 3600
    if design.budget_hours is not None and first > design.budget_hours:
        print(
            f"The first runs take an estimated {first:,.2f} hours, more than the budget of "
            f"{design.budget_hours:g}, and are not stopped: plan fewer claims or shorter runs."
        )
    start = command("steppe", "study", "run", made.path)
    print(
        f"{printable(made.path)}: {len(made.state.todo):,} first runs planned, for a first look at "
        f"{design.first_seeds} seeds. Start them with: {start}"
    )


def _seeds(number: int | None, most: int) -> str:
    return f"over {most}" if number is None else str(number)


@app.command("run", cls=RunCommand)
@with_options(crew=fields(Crew, "workers", "per_gpu", "threads", "stale", min=1))
def study_run(
    context: typer.Context,
    path: _Study,
    crew: dict[str, Any],
    launcher: LauncherName = "local",
    plugin: LauncherPlugins = None,
) -> None:
    """Run a study until its claims are decided; interrupt it at any time and run it again."""
    from steppe.study import load_study, run_study
    from steppe.sweeps import launch

    try:
        complete = run_study(
            path, lambda sweep: launch.run(sweep, launcher, Crew(**crew), **context.obj), remark
        )
    finally:  # what has finished is in the ledger, whatever ended this command
        load_study(path)
    if complete is None:
        print("When these runs are done, run this command again for the next round.")
        return
    _print(load_study(path), "terminal")


@app.command("status")
def study_status(path: _Study, as_json: Json = False) -> None:
    """Show which claims are open, and the runs that are left in this round."""
    from steppe.study import load_study
    from steppe.study.report import study_report, summary
    from steppe.study.rounds import status

    made = load_study(path)
    found = status(made)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _lines(summary(study_report(made)))
    if not found["over"]:
        left = found["runs left in this round"]
        start = command("steppe", "study", "run", path)
        print(f"{left:,} runs left in this round; run them with: {start}")


@app.command("report")
def study_report(
    path: _Study,
    form: Annotated[
        Literal["terminal", "markdown", "json", "html"],
        typer.Option("--format", help="Output format."),
    ] = "terminal",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Output file (default: stdout)."),
    ] = None,
) -> None:
    """Report a study: verdicts in words, intervals over the rounds, numbers, and its design."""
    from steppe.study import load_study

    made = load_study(path)
    if out is None:
        _print(made, form)
        return
    from steppe.study.report import to_text

    replace(out, to_text(made, form).encode())
    remark(f"{out}: {len(made.outcomes):,} runs")


def _print(made: Study, form: str) -> None:
    from steppe.study.report import to_text

    print(to_text(made, form), end="")


def _lines(texts: Iterable[str]) -> None:
    for text in texts:
        print(printable(text))
