"""`steppe train`, `steppe evaluate` and `steppe export`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from steppe.errors import UserError
from steppe.strangers import printable
from steppe.training.config import RunConfig

from .common import Chosen, Device, Json, Overrides, Root, Runs, talk, writable
from .options import SHORTCUTS, keys, overriding, with_options

_UNSET = ("version", "merged_from", "resolved", "data")


@with_options(
    given=keys(*(key for key in RunConfig.model_fields if key not in _UNSET)), shortcuts=SHORTCUTS
)
def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Run folder.")],
    given: dict[str, Any],
    shortcuts: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="config.json with initial settings."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the interrupted run in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train one model on all domains except the held-out targets.

    On several GPUs: torchrun --nproc-per-node N -m steppe train ...
    """
    from steppe import training
    from steppe.console import say
    from steppe.training.progress import Display, summary

    run = training.RunDirectory(out)
    if resume and not run.exists() and not given and config is None:
        raise UserError(f"{out} is not a run: there is nothing to resume")
    resumed = run.config() if resume and run.exists() else None
    draw, space = given.pop("draw", None), given.pop("space", None)
    chosen = training.configure(
        given,
        overriding(given, shortcuts, overrides),
        file=config,
        resumed=resumed,
        draw=draw,
        space=space,
    )
    console = talk()
    records = training.train(chosen, out, resume=resume, display=Display(console))
    if os.environ.get("RANK", "0") != "0":  # only the first of several processes prints
        return
    best = training.select(records)
    if as_json:
        print(json.dumps(best))
        return
    validated = training.validation_accuracy(best) is not None
    title = "best by validation" if validated else "last (no validation images)"
    if best.get("averaged") and not records[0].get("averaged"):
        # Computed at the end, from the weights of the other records. It is also the best
        # checkpoint, and 'evaluate' calls it that.
        title = "best weights, the average"
    print(printable(f"{title}: {summary(best)}"))
    say(console, f"{out}: done")


def evaluate(
    runs: Runs,
    ensemble: Annotated[
        bool,
        typer.Option(
            "--ensemble", help="Sum the logits of all runs (EoA, if they were trained with sma)."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder DOMAIN/CLASS/IMAGE or CLASS/IMAGE, or dataset name (default: the run's "
            "target domains).",
        ),
    ] = None,
    which: Chosen = None,
    root: Root = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Evaluate a run's model, or an ensemble of several runs, on all images of some domains."""
    from steppe.console import stdout
    from steppe.training import evaluate_ensemble, evaluate_run
    from steppe.training.progress import ensemble_table, score_table, weights

    home = str(root) if root else None
    if ensemble:
        found = evaluate_ensemble(runs, data, which=which, device=device, root=home)
        names = [str(run) for run in runs]
        plain = {domain: value.to_json(names) for domain, value in found.items()}
        members = [(m.which, m.step) for value in found.values() for m in value.members]
        shown = ensemble_table(found, names, f"{weights(which, members)}, all images")
    elif len(runs) > 1:
        raise UserError(f"got {len(runs)} runs: add --ensemble, or evaluate one at a time")
    else:
        scores = evaluate_run(runs[0], data, which=which, device=device, root=home)
        plain = {domain: value.to_json() for domain, value in scores.items()}
        used = weights(which, ((s.which, s.step) for s in scores.values()))
        title = f"{runs[0].name}: {used}, all images"
        shown = score_table(scores, title)
    if as_json:
        print(json.dumps(plain, indent=2))
    else:
        stdout().print(shown)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Output file. Its extension sets the format: .safetensors contains the weights "
            "for timm or torchvision; .pt2 (torch.export) and .onnx contain the whole network.",
        ),
    ],
    which: Chosen = None,
) -> None:
    """Export a run's network to a file for other programs.

    The file's metadata contains the classes, preprocessing and provenance.
    """
    from steppe.training import RunDirectory, export_run
    from steppe.training.exports import format_of
    from steppe.training.progress import weights

    format_of(out)
    RunDirectory(run).config()
    writable(out)  # creates its folder, so only once the rest is known to be right
    facts = export_run(run, out, which)
    classes = f"{len(json.loads(facts['classes']))} classes"
    used = weights(which, [(facts["which"], int(facts["step"]))])
    print(printable(f"{out}: {facts['backbone']}, {classes}, {used}"))
