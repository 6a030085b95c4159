"""Does every algorithm train? Accuracies after short runs that differ in the algorithm alone.

Penalties that would set in later set in after a quarter of the run. This is no ranking: nothing is
tuned per algorithm.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import IMAGES, KNOWN, OVERRIDES, Result, command, option
from images import name_of, packed_images
from runs import SweepOptions, carry_out, refuse_own

from steppe.algorithms import algorithm_names, algorithm_spec
from steppe.domains import load
from steppe.sweeps import Grid
from steppe.training import RunDirectory

BASELINE = "ERM"
ONSETS = ("anneal_steps", "ib_anneal_steps", "burn_in_steps")
"""Options that say when a penalty sets in."""
PENALTIES = ("penalty", "ib_penalty", "logit_penalty", "feature_penalty")
"""Options that weight one."""


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    images: Path | None = IMAGES
    dataset: str | None = option(None, "A built-in dataset instead of a folder.", metavar="NAME")
    algorithms: str = option("all", "Comma-separated names.")
    backbone: str = option("small-cnn", KNOWN)
    weights: str = option("none", "Initial weights, as in 'steppe train'.")
    optimizer: str = option("adam", KNOWN)
    lr: float = option(3e-4, "Learning rate.", min=0.0)
    image_size: int = option(32, "Height and width of the network's input.", min=1)
    batch: int = option(8, "Images per domain and update.", min=2)
    weaken: float = option(1.0, "Multiply the penalties' default weights by this.", min=0.0)
    steps: int = option(200, "Updates per run.", min=4)
    targets: int = option(2, "Held-out domains, one at a time: the last ones.", min=1)
    trials: int = option(3, "Seeds.", min=1)
    overrides: list[str] | None = OVERRIDES

    def names(self) -> list[str]:
        if self.algorithms == "all":
            return list(algorithm_names())
        asked = [algorithm_spec(name).name for name in self.algorithms.split(",")]
        return list(dict.fromkeys((BASELINE, *asked)))

    def grid(self, images: Path | str, algorithm: str) -> Grid:
        domains = [domain.name for domain in load(images).domains]
        own: dict[str, Any] = {"backbone": self.backbone, "weights": self.weights}
        own |= {"image_size": self.image_size, "batch_size": self.batch, "steps": self.steps}
        own |= {"checkpoint_every": self.steps, "optimizer.lr": self.lr}
        known = algorithm_spec(algorithm).default_options
        own |= {f"algorithm.{name}": self.steps // 4 for name in ONSETS if name in known}
        if self.weaken != 1:
            weights = {name: known[name] for name in PENALTIES if name in known}
            own |= {f"algorithm.{name}": self.weaken * w for name, w in weights.items()}
        given = self.overrides or []
        if algorithm == BASELINE:  # it has no options
            given = [text for text in given if not text.startswith("algorithm.")]
        refuse_own(own, given)
        return Grid(
            (str(images),),
            algorithms=(algorithm,),
            optimizers=(self.optimizer,),
            targets=",".join(islice(reversed(domains), self.targets)),
            trials=self.trials,
            draws=0,
            overrides=(*(f"{key}={value}" for key, value in own.items()), *given),
        )


def measure(options: Options) -> Result:
    with ExitStack() as stack:
        images: Path | str | None = options.dataset
        if images is None:
            images = stack.enter_context(packed_images(options.images))
        names = options.names()
        grids = [options.grid(images, name) for name in names]
        found = carry_out("sanity", grids, options)
    return {
        "images": options.dataset or name_of(options.images),
        "targets": grids[0].targets.split(","),
        "backbone": options.backbone,
        "weights": Path(options.weights).stem,
        "optimizer": options.optimizer,
        "learning rate": options.lr,
        "penalties multiplied by": options.weaken,
        "images per domain": options.batch,
        "pixels": options.image_size,
        "updates": options.steps,
        "seeds": options.trials,
        "algorithms": {name: row(runs) for name, runs in zip(names, found, strict=True)},
    }


def row(runs: Sequence[RunDirectory | None]) -> dict[str, Any]:
    """Results after the last update: mean and deviation over targets and seeds.

    Accuracies are in percent. The cross-entropy is that of the validation images.
    """
    last = [run.records()[-1]["domains"] for run in runs if run is not None]
    found: dict[str, Any] = {"runs": len(runs), "diverged": len(runs) - len(last)}
    for title, part, measured, unit in (
        ("validation", "val", "accuracy", 100),
        ("target", "test", "accuracy", 100),
        ("cross-entropy", "val", "cross_entropy", 1),
    ):
        scores = [
            unit * fmean(parts[part][measured] for parts in domains.values() if part in parts)
            for domains in last
        ]
        found[title] = round(fmean(scores), 2) if scores else None
        found[f"deviation of {title}"] = round(stdev(scores), 2) if len(scores) > 1 else None
    return found


main = command(Options, measure)
