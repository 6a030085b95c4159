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

_UNSET = ("version", "resolved", "data")


@with_options(
    given=keys(*(key for key in RunConfig.model_fields if key not in _UNSET)), shortcuts=SHORTCUTS
)
def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder.")],
    given: dict[str, Any],
    shortcuts: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A config.json to start from.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run in DIR was interrupted.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the selected record as JSON, for programs.")
    ] = False,
) -> None:
    """Train one model: some domains held out, the others trained on.

    Several GPUs or processes: torchrun --nproc-per-node N -m steppe train ...
    """
    from steppe import training
    from steppe.console import say
    from steppe.training.progress import Display, summary

    run = training.RunDirectory(out)
    if resume and not run.exists() and not given and config is None:
        raise UserError(f"{out} is not a run: nothing to resume")
    resumed = run.config() if resume and run.exists() else None
    draw, space = given.pop("draw", None), given.pop("space", None)
    chosen = training.configure(
        given,
        overriding(shortcuts, overrides),
        file=config,
        resumed=resumed,
        draw=draw,
        space=space,
    )
    console = talk()
    records = training.train(chosen, out, resume=resume, display=Display(console))
    if os.environ.get("RANK", "0") != "0":  # one of several processes, and not the one that talks
        return
    best = training.select(records)
    if as_json:
        print(json.dumps(best))
        return
    validated = training.validation_accuracy(best) is not None
    title = "best by validation" if validated else "last (no validation images)"
    if best.get("averaged") and not records[0].get("averaged"):
        title = "the average"  # made at the end, of what the other records are of
    print(printable(f"{title}: {summary(best)}"))
    say(console, f"{out}: done")


def evaluate(
    runs: Runs,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Also sum the logits of all runs: with sma, EoA.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder DOMAIN/CLASS/IMAGE or CLASS/IMAGE, or a dataset's name (default: the "
            "run's own target domains).",
        ),
    ] = None,
    which: Chosen = None,
    root: Root = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Evaluate a run's model, or an ensemble of several, on every image of some domains."""
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
        raise UserError(f"{len(runs)} runs were given: add --ensemble, or evaluate one at a time")
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
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            callback=writable,
            help="The file to write. Its ending chooses the format: .safetensors has the weights "
            "for timm or torchvision; .pt2 (torch.export) and .onnx the whole network.",
        ),
    ],
    which: Chosen = None,
) -> None:
    """Write a run's network as one file that other programs load.

    Classes, preprocessing and provenance are in the file's metadata.
    """
    from steppe.training import export_run
    from steppe.training.progress import weights

    facts = export_run(run, out, which)
    classes = f"{len(json.loads(facts['classes']))} classes"
    used = weights(which, [(facts["which"], int(facts["step"]))])
    print(printable(f"{out}: {facts['backbone']}, {classes}, {used}"))
