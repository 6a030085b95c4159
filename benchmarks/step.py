"""Time of a training step, in total and in parts, compared with Adam and with plain training.

Steps and batches are those of `steppe train`, with the full data path from packed images. Plain
training is eager, with torch's defaults (TF32 in convolutions only) and images transformed by
Pillow; "strict" is the same in fp32. DomainBed's step has its batch in memory. --algorithm compares
with ERM.
"""

import copy
import gc
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Result, RunOptions, Still, command, option, ratio, seconds, spread
from images import name_of, packed_images
from torch import nn

from steppe.algorithms import algorithm_names, algorithm_spec
from steppe.domains import load
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_spec
from steppe.training import RunConfig, RunDirectory, make_config
from steppe.training.execution import WARM_UP, Engine, Gears
from steppe.training.precision import autocast, resolve, settings
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from steppe.training.update import Passes

BASELINE = "ERM"  # of algorithms
PLAIN = {"precision": "fp32", "engine": "off", "data": "host"}
RIVALS = ("plain", "strict")  # plain training with torch's defaults, and in strict fp32
DOMAINBED = "DomainBed, ERM with Adam"
AT_HAND = "ms per step, batch at hand"


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    batch: int = option(24, "Images per step, over all source domains.", min=2)
    algorithm: list[str] | None = option(None, "Compare with ERM; repeatable, or 'all'.")
    baseline: str = option("adam", "The optimizer to compare with.")
    rival: list[str] | None = option(None, "plain, strict, or none (default: both).")
    rounds: int = option(5, "Number of measurements.", min=1)
    steps: int = option(4, "Steps per measurement.", min=1)
    dataset: str | None = option(None, "A built-in dataset instead of a folder.", metavar="NAME")
    mixed: bool = option(False, "Generate images of many sizes.", "--mixed")
    image_size: int | None = option(None, "Height and width of the network's input.", min=1)
    eager: bool = option(False, "Disable compilation and CUDA graphs.", "--eager")
    deterministic: bool = option(False, "As in 'steppe train'.", "--deterministic")

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the folder of images, packed, or the built-in dataset's name."""
        if self.dataset is not None:
            yield Path(self.dataset)
            return
        with packed_images(self.images, mixed=self.mixed) as root:
            yield root

    def config(self, images: Path, optimizer: str, **values: str) -> RunConfig:
        sources = len(load(str(images)).domains) - 1
        if self.batch % sources:
            raise UserError(f"--batch {self.batch} is not a multiple of {sources} domains")
        own: dict[str, Any] = {
            "batch_size": self.batch // sources,
            "engine": "off" if self.eager else "auto",
            "deterministic": self.deterministic,
            **({"image_size": self.image_size} if self.image_size else {}),
        }
        return make_config({**replace(self, optimizer=optimizer).values(images), **own, **values})


class Runner:
    """A warmed-up training run; without `parts`, only `alone` works and no worker reads ahead.

    `defaults` leaves torch's switches as they are when it is imported.
    """

    def __init__(
        self, config: RunConfig, out: Path, parts: bool = True, defaults: bool = False
    ) -> None:
        self.device = torch.device(config.device)
        self._precision = resolve(config.precision, self.device, config.optimizer)
        fixed = partial(settings, self._precision, config.deterministic)
        self._settings = torch_defaults if defaults else fixed
        with self._settings():
            processes = Processes(self.device)
            self.trainer = trainer = Trainer(config, RunDirectory(out), processes, self._precision)
            self._batches = trainer.store.training(trainer.sampling, 0, 10**9)
            # Each objective of an adversarial algorithm needs its own warm-up before capture.
            turns = 1 if len(trainer.objectives) == 1 else 4
            for _ in range((WARM_UP + 2) * turns if trainer.engine.captured else 2):
                trainer.step(next(self._batches))
            self.ready = next(self._batches)
        if not parts:
            self._batches = iter(())
        # Skip batches that workers read ahead; workers also finish at about the same time.
        workers = getattr(trainer.store, "workers", 0)
        self._ahead, self._workers = 2 * workers + 1, max(1, workers)
        self._passes: Callable[[], object] | None = None

    def about(self) -> dict[str, Any]:
        name, engine = self.trainer.config.optimizer.name, self.trainer.engine
        return {
            "optimizer": name,
            "passes": optimizer_spec(name).passes,
            "precision": self.trainer.precision,
            "engine": engine.gear,
            "reasons": list(engine.reasons),
            "images": self.trainer.store.where,
        }

    def alone(self, steps: int) -> dict[str, float]:
        """Return seconds per step with the batch in memory, over all objectives' turns."""
        with self._settings():
            return {"ready": seconds(self.device, lambda: self.trainer.step(self.ready), steps)}

    def measure(self, steps: int) -> dict[str, float]:
        timed = partial(seconds, self.device)

        def step() -> None:
            self.trainer.step(next(self._batches))
            self.trainer.check_divergence()

        with self._settings():
            timed(step, self._ahead)
            self.trainer.update_seconds = 0.0
            whole = timed(step, steps)
            update = self.trainer.update_seconds / steps
            ready = self.alone(steps)["ready"]
            if self._passes is None:
                self._passes = self._prepare_passes()
            one_pass = timed(self._passes, steps)
            self.trainer.parallel.zero_grad()
            timed(lambda: next(self._batches), self._ahead)
            rounds = max(2, -(-steps // self._workers)) * self._workers
            data = timed(lambda: next(self._batches), rounds)
        return {"whole": whole, "update": update, "ready": ready, "pass": one_pass, "data": data}

    def _prepare_passes(self) -> Callable[[], object]:
        trainer = self.trainer
        network = trainer.algorithm.network
        cast = partial(autocast, self._precision, self.device)
        with cast():
            prepared = [trainer.algorithm.prepare([trainer.laid_out(b) for b in self.ready])]
        engine = Engine(
            Gears(trainer.engine.compiled, trainer.engine.captured),
            Passes(trainer.parallel, cast),
            network,
            batch=network.compiled.batch if network.compiled else None,
            deterministic=trainer.config.deterministic,
        )
        idle = Still(trainer.parallel.parameters())
        run = partial(engine.optimize, idle, trainer.objectives[0].name, prepared)
        for _ in range(WARM_UP + 2):
            run()
        return run


def contenders(options: Options, images: Path) -> dict[str, RunConfig]:
    """Configure both optimizers, each also with plain training; or algorithms, ERM first."""
    asked, optimizer = options.algorithm or (), options.optimizer
    if asked:
        chosen = [algorithm_spec(name).name for name in asked if name != "all"]
        names = dict.fromkeys((BASELINE, *(algorithm_names() if "all" in asked else chosen)))
        return {name: options.config(images, optimizer, algorithm=name) for name in names}
    optimizers = tuple(dict.fromkeys((optimizer, options.baseline)))
    configs = {name: options.config(images, name) for name in optimizers}
    precision = resolve(options.precision, options.where, configs[options.baseline].optimizer)
    # On a CPU, fp32 is already plain, and the two do not differ.
    known = RIVALS if options.where.type == "cuda" else RIVALS[: precision != "fp32"]
    for rival in options.rival or RIVALS:
        if rival not in (*RIVALS, "none"):
            raise UserError(unknown("rival", rival, RIVALS))
        if rival in known:
            for name in optimizers:
                configs[f"{name}, {rival}"] = options.config(images, name, **PLAIN)
    return configs


@contextmanager
def torch_defaults() -> Iterator[None]:
    with settings("fp32", deterministic=False):
        torch.backends.cudnn.allow_tf32 = True
        yield


class DomainBed:
    """`ERM` and `ResNet` of DomainBed (b93c22a), transcribed, on the batch that a run trains on."""

    def __init__(self, runner: Runner) -> None:
        self.device = runner.device
        ours = runner.trainer.algorithm.network
        self.featurizer = copy.deepcopy(ours.featurizer).to(memory_format=torch.contiguous_format)
        classifier = nn.Linear(ours.n_features, ours.n_classes, device=self.device)
        self.network = nn.Sequential(self.featurizer, classifier)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=5e-5, weight_decay=0.0)
        self.minibatches = [
            (ours.normalize(batch.images).contiguous(), batch.labels) for batch in runner.ready
        ]
        for _ in range(WARM_UP):
            self.alone(1)

    def alone(self, steps: int) -> dict[str, float]:
        with torch_defaults():
            return {"ready": seconds(self.device, self.update, steps)}

    def update(self) -> float:
        all_x = torch.cat([x for x, y in self.minibatches])
        all_y = torch.cat([y for x, y in self.minibatches])
        loss = nn.functional.cross_entropy(self.network(all_x), all_y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def measure(options: Options) -> Result:
    device = options.where
    with (
        options.opened() as images,
        tempfile.TemporaryDirectory(prefix="steppe-bench-") as out,
    ):
        configs = contenders(options, images)
        ready = harness.track(configs.items(), f"{options.backbone}: getting ready")
        runners = {
            name: Runner(config, Path(out), not options.algorithm, name.endswith(", plain"))
            for name, config in ready
        }
        turns = {
            name: partial(runner.alone if options.algorithm else runner.measure, options.steps)
            for name, runner in runners.items()
        }
        if not options.algorithm:
            turns[DOMAINBED] = partial(DomainBed(next(iter(runners.values()))).alone, options.steps)
        found = harness.take_turns(turns, options.rounds, options.backbone)
        theirs = [row["ready"] for row in found.pop(DOMAINBED, ())]
        runs = {name: runner.about() for name, runner in runners.items()}
        network = next(iter(runners.values())).trainer.algorithm
        parameters = sum(p.nbytes for p in network.parameters())
        del runners, turns, network  # free memory before measuring peaks
        for name, rows in found.items():
            runs[name] |= _figures(rows, options, runs[name]["passes"])
            if device.type == "cuda" and not options.algorithm:
                runs[name]["peak GiB"] = _peak(configs[name], Path(out), device) / 2**30
    first, *others = configs
    per_domain = configs[first].batch_size
    part = "ready" if options.algorithm else "whole"
    times = {name: [row[part] for row in rows] for name, rows in found.items()}
    pairs = [(other, first) if options.algorithm else (first, other) for other in others]
    result: Result = {
        "backbone": options.backbone,
        "optimizer": options.optimizer,
        "batch": f"{options.batch // per_domain} x {per_domain}",
        "deterministic": options.deterministic,
        "data": options.dataset or name_of(options.images) + ", mixed sizes" * options.mixed,
        "image size": configs[first].image_size,
        "rounds": options.rounds,
        "steps a round": options.steps,
        "runs": runs,
        "ratios": {f"{a} over {b}": ratio(times[a], times[b]) for a, b in pairs},
    }
    if theirs:
        ours = [row["ready"] for row in found[first]]
        result[f"{DOMAINBED}, {AT_HAND}"] = spread([1e3 * t for t in theirs])
        result["ratios"][f"{first} over {DOMAINBED}, batch at hand"] = ratio(ours, theirs)
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result["peak GiB of the process"] = round(peak / 2**30, 3)
    elif not options.algorithm:
        more = runs[first]["peak GiB"] - runs[options.baseline]["peak GiB"]
        result[f"memory over {options.baseline}, in parameter-sized buffers"] = round(
            more * 2**30 / parameters, 3
        )
    return result


def _figures(rows: Sequence[dict[str, float]], options: Options, passes: float) -> Result:
    figures: dict[str, Callable[[dict[str, float]], float]] = {
        "ms per step": lambda r: 1e3 * r["whole"],
        "images per second": lambda r: options.batch / r["whole"],
        "ms per forward and backward": lambda r: 1e3 * r["pass"],
        "step over its passes": lambda r: r["whole"] / (passes * r["pass"]),
        AT_HAND: lambda r: 1e3 * r["ready"],
        "batch at hand, over its passes": lambda r: r["ready"] / (passes * r["pass"]),
        "ms of data alone": lambda r: 1e3 * r["data"],
        "data alone over step": lambda r: r["data"] / r["whole"],
        "share that data adds to a step": lambda r: 1 - r["ready"] / r["whole"],
    }
    if options.where.type == "cpu":  # on a GPU, updates are asynchronous
        figures["ms in forward, backward, optimizer"] = lambda r: 1e3 * r["update"]
        figures["overhead"] = lambda r: 1 - r["update"] / r["whole"]
    if options.algorithm:
        figures = {AT_HAND: figures[AT_HAND]}
    return {name: spread([figure(row) for row in rows]) for name, figure in figures.items()}


def _peak(config: RunConfig, out: Path, device: torch.device) -> int:
    """Return the peak GPU bytes of a run; call after others have allocated library workspaces."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    # Requested bytes, because the allocator's rounding depends on what was free.
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    Runner(config, out)
    harness.wait(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)


main = command(Options, measure)
