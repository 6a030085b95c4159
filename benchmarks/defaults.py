"""Default learning rates and FAD's radius against grids around them, by validation accuracy.

Runs are those of an ordinary sweep with the tuned defaults (space `fair`) and other values: a sweep
that was interrupted goes on, and `steppe sweep status` shows how far it is. The tables of the docs
are made by `docs/defaults.py`, from stored results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Result, command, facts, option
from runs import SweepOptions, carry_out

from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec
from steppe.sweeps import Grid
from steppe.training import RunDirectory, select, validation_accuracy

FACTORS = (1 / 9, 1 / 3, 1, 3, 9)
"""Of the default learning rate; those about the radius have the middle three."""
RHO, BATCHES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), (8, 32)
SEEDS = 3


@dataclass(frozen=True)
class Study:
    """A task: from scratch, unless there is a backbone to be fine-tuned."""

    dataset: str
    target: str
    backbone: str = ""
    optimizers: tuple[str, ...] = ()
    """Those whose learning rates are tried, all if empty; none of it where FAD's radius is."""
    radius: bool = False

    def settings(self) -> Iterator[tuple[tuple[str, ...], str, str, tuple[str, ...], str]]:
        """For every cell: its row, the optimizer, the learning rate, other overrides, a tag."""
        for optimizer in ("fad",) if self.radius else self.optimizers or optimizer_names():
            default = optimizer_spec(optimizer).defaults(pretrained=bool(self.backbone))["lr"]
            rates = [default * factor for factor in (FACTORS[1:4] if self.radius else FACTORS)]
            if self.radius:
                for batch, rho, lr in product(BATCHES, RHO, rates):
                    overrides = (f"optimizer.rho={rho:g}", f"batch_size={batch}")
                    tag = f"b{batch}-rho{rho:g}-lr{lr:.3g}"
                    yield (str(batch), f"{rho:g}"), optimizer, f"{lr:.3g}", overrides, tag
            else:
                for factor, lr in zip(FACTORS, rates, strict=True):
                    yield (optimizer,), optimizer, f"{lr:.4g}", (), f"x{factor:.3g}"


FEW = ("adam", "adamw", "sgd", "sam", "fad")
STUDIES = {
    "digits": Study("RotatedDigits", "75"),
    "doodles": Study("Doodles", "sketch"),
    "pacs-lite0": Study("PACS", "sketch", "tf_efficientnet_lite0", FEW),
    "pacs-resnet50-v1": Study("PACS", "sketch", "resnet50-v1", FEW),
    "radius-digits": Study("RotatedDigits", "75", radius=True),
    "radius-doodles": Study("Doodles", "sketch", radius=True),
}


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    study: list[str] | None = option(None, f"May be repeated: {', '.join(STUDIES)}.")
    root: Path | None = option(None, "The data folder.")
    weights: Path | None = option(None, "The backbone's ImageNet weights.")


def measure(options: Options) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.study or ():
        if name not in STUDIES:
            raise UserError(unknown("study", name, STUDIES))
    studies = {name: run(name, options) for name in options.study or ()}
    return {"environment": facts(device), "studies": studies}


def run(name: str, options: Options) -> dict[str, Any]:
    """Accuracies by row and learning rate."""
    study = STUDIES[name]
    given = {"root": options.root, "weights": options.weights}
    config: dict[str, Any] = {key: str(value) for key, value in given.items() if value}
    if study.backbone:
        config |= {"backbone": study.backbone, "steps": 201, "checkpoint_every": 200}
    settings = list(study.settings())
    planned = [
        Grid(
            (study.dataset,),
            optimizers=(optimizer,),
            trials=SEEDS,
            draws=0,
            targets=study.target,
            overrides=(f"optimizer.lr={lr}", *overrides),
            options=config,
            tag=tag,
        )
        for _, optimizer, lr, overrides, tag in settings
    ]
    found: dict[str, Any] = {}
    for (row, _, lr, _, _), runs in zip(settings, carry_out(name, planned, options), strict=True):
        rates = found
        for key in row:
            rates = rates.setdefault(key, {})
        rates[lr] = accuracies(runs)
    return found


def accuracies(runs: Sequence[RunDirectory | None]) -> list[float | None]:
    """Of validation, in percent, by seed; None: it diverged."""
    best = [None if run is None else validation_accuracy(select(run.records())) for run in runs]
    return [None if value is None else round(100 * value, 2) for value in best]


main = command(Options, measure)
if __name__ == "__main__":
    main()
