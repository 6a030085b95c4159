"""Test accuracy with the fast engine, compared with plain training in paired runs.

The runs of a pair differ only by rounding, which training amplifies. The confidence interval is
Student's over seeds, on the mean difference over targets.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness import KNOWN, OVERRIDES, PACKED, Result, RunOptions, command, option
from images import packed_images
from runs import SweepOptions, carry_out, refuse_own, said
from scipy.special import stdtrit

from steppe.domains import load
from steppe.errors import RunError
from steppe.sweeps import Grid
from steppe.training import RunDirectory

LEVEL = 0.95
BAR = 1.5  # the interval of the mean difference must be within +-BAR points
WAYS: dict[str, dict[str, Any]] = {
    "engine": {"engine": "auto", "data": "auto", "packed": True},
    "plain": {"engine": "off", "data": "host", "packed": False, "precision": "fp32"},
}
Accuracies = Mapping[tuple[str, str, int], float]  # by way, target and seed, from 0 to 1


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions, RunOptions):
    images: Path = option(MISSING, f"{PACKED}.", metavar="DIR")
    weights: str = option("none", "none, imagenet, or a file.")
    optimizer: str = option("fad", KNOWN)
    precision: str = option("auto", "Precision of the engine: auto, fp32, tf32, fp16 or bf16.")
    steps: int = option(300, "Updates per run.", min=1)
    seeds: int = option(3, "Pairs of runs per target.", min=1)
    target: list[str] | None = option(None, "Test domain; repeatable (default: every domain).")
    overrides: list[str] | None = OVERRIDES

    def grid(self, way: str) -> Grid:
        values = {
            "backbone": self.backbone,
            "weights": self.weights,
            "precision": self.precision,
            "steps": self.steps,
            "checkpoint_every": self.steps,
            "device": self.device,
            **WAYS[way],
        }
        own = {*values, "dataset", "targets", "optimizer", "seed", "trial_seed"}
        refuse_own(own, self.overrides or ())
        return Grid(
            (str(self.images),),
            optimizers=(self.optimizer,),
            trials=self.seeds,
            draws=0,
            targets=",".join(dict.fromkeys(self.target or ())) or "single",
            overrides=tuple(self.overrides or ()),
            options=values,
            tag=way,
        )


def measure(options: Options) -> Result:
    with packed_images(options.images):
        fingerprint = load(options.images).fingerprint()[:16]
    grids = [options.grid(way) for way in WAYS]
    found = carry_out(f"learning-{options.images.name}", grids, options)
    accuracies: dict[tuple[str, str, int], float] = {}
    lines: dict[str, list[str]] = {}
    for way, runs in zip(WAYS, found, strict=True):
        for run in runs:
            if run is None:
                raise RunError(f"a run in {options.out} did not finish: see 'steppe sweep status'")
            config = run.config()
            accuracies[way, config.targets[0], config.trial_seed] = last_accuracy(run)
            lines.setdefault(way, said(run, options.images))
    own = ("backbone", "optimizer", "steps", "precision")
    return {
        **{name: getattr(options, name) for name in own},
        "weights": Path(options.weights).name,
        "data": options.images.resolve().name,
        "fingerprint": fingerprint,
        "overrides": list(options.overrides or ()),
        "said": lines,
        **summary(accuracies),
    }


def last_accuracy(run: RunDirectory) -> float:
    target = run.config().targets[0]
    return float(run.records()[-1]["domains"][target]["test"]["accuracy"])


def summary(accuracies: Accuracies) -> Result:
    """Summarize engine minus plain accuracy, in percentage points."""
    targets = list(dict.fromkeys(target for _, target, _ in accuracies))
    seeds = sorted({seed for _, _, seed in accuracies})
    points = {
        (t, s): 100 * (accuracies["engine", t, s] - accuracies["plain", t, s])
        for t, s in product(targets, seeds)
    }
    means = [statistics.fmean(points[target, seed] for target in targets) for seed in seeds]
    overall = difference(means)
    by_target: Result = {}
    for t in targets:
        ways = {w: 100 * statistics.fmean(accuracies[w, t, s] for s in seeds) for w in WAYS}
        by_target[t] = difference([points[t, s] for s in seeds])
        by_target[t] |= {way: round(mean, 3) for way, mean in ways.items()}
    return {
        "difference": overall,
        "by seed": {str(s): round(mean, 4) for s, mean in zip(seeds, means, strict=True)},
        "by target": by_target,
        "bar": BAR,
        "within the bar": overall["interval"] and max(map(abs, overall["interval"])) <= BAR,
        "pairs": [
            {"target": t, "seed": s, **{way: accuracies[way, t, s] for way in WAYS}}
            for t, s in points
        ],
    }


def difference(values: Sequence[float]) -> Result:
    n, mean, interval = len(values), statistics.fmean(values), None
    if n > 1:
        half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * statistics.stdev(values) / n**0.5
        interval = [round(mean - half, 4), round(mean + half, 4)]
    return {"mean": round(mean, 4), "interval": interval, "n": n}


main = command(Options, measure)
