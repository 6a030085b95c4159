"""Validation accuracy of default learning rates and FAD's radius, compared with grids around them.

The runs are ordinary sweeps in the space `fair`: rerun the command to resume, and see progress with
`steppe sweep status`. `docs/defaults.py` builds the tables in the docs from stored results.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from harness import Result, command, option
from runs import SweepOptions, carry_out

from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec
from steppe.sweeps import Grid
from steppe.training import RunDirectory, select, validation_accuracy

FACTORS = (1 / 9, 1 / 3, 1, 3, 9)  # of the default rate; radius studies use the middle three
RHO, BATCHES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), (8, 32)
SEEDS = 3


@dataclass(frozen=True)
class Study:
    dataset: str
    target: str
    backbone: str = ""  # to fine-tune; empty trains from scratch
    optimizers: tuple[str, ...] = ()
    radius: bool = False  # vary FAD's radius instead of optimizers' learning rates

    def cells(self, config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Grid]]:
        """Yield the keys of every cell, ending with its learning rate, and its runs."""
        common = partial(
            Grid, (self.dataset,), trials=SEEDS, draws=0, targets=self.target, options=config
        )
        for optimizer in ("fad",) if self.radius else self.optimizers:
            default = optimizer_spec(optimizer).defaults(pretrained=bool(self.backbone))["lr"]
            grid = partial(common, optimizers=(optimizer,))
            if not self.radius:
                for factor in FACTORS:
                    lr, tag = f"{default * factor:.4g}", f"x{factor:.3g}"
                    yield (optimizer, lr), grid(overrides=(f"optimizer.lr={lr}",), tag=tag)
                continue
            for batch, rho, factor in product(BATCHES, RHO, FACTORS[1:4]):
                lr, radius = f"{default * factor:.3g}", f"{rho:g}"
                values = (f"optimizer.lr={lr}", f"optimizer.rho={radius}", f"batch_size={batch}")
                tag = f"b{batch}-rho{radius}-lr{lr}"
                yield (str(batch), radius, lr), grid(overrides=values, tag=tag)


FEW = ("adam", "adamw", "sgd", "sam", "fad")
NAMES = [name for name in optimizer_names() if name != "asam"]  # asam shares sam's rate
RATED, LATER = tuple(NAMES[:11]), tuple(NAMES[11:])  # the paper's, and those after it
STUDIES = {
    "digits": Study("RotatedDigits", "75", optimizers=RATED),
    "doodles": Study("Doodles", "sketch", optimizers=RATED),
    "digits-later": Study("RotatedDigits", "75", optimizers=LATER),
    "pacs-lite0": Study("PACS", "sketch", "tf_efficientnet_lite0", FEW),
    "pacs-resnet50-v1": Study("PACS", "sketch", "resnet50-v1", FEW),
    "radius-digits": Study("RotatedDigits", "75", radius=True),
    "radius-doodles": Study("Doodles", "sketch", radius=True),
}


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    study: list[str] | None = option(None, f"Repeatable: {', '.join(STUDIES)}.")
    root: Path | None = option(None, "Data folder.")
    weights: Path | None = option(None, "ImageNet weights of the backbone.")
    device = "auto"


def measure(options: Options) -> Result:
    for name in options.study or ():
        if name not in STUDIES:
            raise UserError(unknown("study", name, STUDIES))
    return {"studies": {name: run(name, options) for name in options.study or ()}}


def run(name: str, options: Options) -> dict[str, Any]:
    study = STUDIES[name]
    given = {"root": options.root, "weights": options.weights}
    config: dict[str, Any] = {key: str(value) for key, value in given.items() if value}
    if study.backbone:
        config |= {"backbone": study.backbone, "steps": 201, "checkpoint_every": 200}
    places, grids = zip(*study.cells(config), strict=True)
    found: dict[str, Any] = {}
    for (*row, lr), runs in zip(places, carry_out(name, grids, options), strict=True):
        rates = found
        for key in row:
            rates = rates.setdefault(key, {})
        # By seed; None for runs that diverged.
        rates[lr] = [None if run is None else accuracy(run) for run in runs]
    return found


def accuracy(run: RunDirectory) -> float | None:
    best = validation_accuracy(select(run.records()))
    return None if best is None else round(100 * best, 2)


main = command(Options, measure)
