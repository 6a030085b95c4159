"""What a step of a run costs, whole and in parts, beside Adam's and beside a plain one.

The same batches and steps as in `steppe train`, from packed images, with the whole data path. Plain
means eager, in fp32, with images transformed by Pillow. --algorithm compares steps with ERM's.
"""

import gc
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Result, RunOptions, Still, command, option, ratio, seconds, spread
from images import name_of, packed_images

from steppe.algorithms import algorithm_names, algorithm_spec
from steppe.domains import load
from steppe.errors import UserError
from steppe.optim import optimizer_spec
from steppe.training import RunConfig, RunDirectory, make_config
from steppe.training.execution import WARM_UP, Engine, Gears
from steppe.training.precision import autocast, resolve, settings
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from steppe.training.update import Passes

ADAM, BASELINE = "adam", "ERM"  # what other optimizers and algorithms are compared with
PLAIN = {"precision": "fp32", "engine": "off", "data": "host"}
AT_HAND = "ms per step, batch at hand"


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    batch: int = option(24, "Images in a step, of all domains but one.", min=2)
    algorithm: list[str] | None = option(None, "To compare with ERM; may be repeated; or all.")
    rounds: int = option(5, "Measurements.", min=1)
    steps: int = option(4, "Steps in a measurement.", min=1)
    eager: bool = option(False, "Without the engine: nothing compiled or captured.", "--eager")
    deterministic: bool = option(False, "As in 'steppe train'.", "--deterministic")

    def config(self, images: Path, optimizer: str, **values: str) -> RunConfig:
        sources = len(load(images).domains) - 1
        if self.batch % sources:
            raise UserError(f"--batch {self.batch} is not a multiple of {sources} domains")
        own = {
            "batch_size": self.batch // sources,
            "engine": "off" if self.eager else "auto",
            "deterministic": self.deterministic,
        }
        return make_config({**replace(self, optimizer=optimizer).values(images), **own, **values})


class Runner:
    """A way of training, ready to be timed; without `parts`, only `alone`: no worker reads on."""

    def __init__(self, config: RunConfig, out: Path, parts: bool = True) -> None:
        self.device = torch.device(config.device)
        self._precision = resolve(config.precision, self.device, config.optimizer)
        self._settings = partial(settings, self._precision, config.deterministic)
        with self._settings():
            processes = Processes(self.device)
            self.trainer = trainer = Trainer(config, RunDirectory(out), processes, self._precision)
            self._batches = trainer.store.training(trainer.sampling, 0, 10**9)
            # Both sides of an adversary's game are captured after steps of their own.
            for _ in range((WARM_UP + 2) * (1 if len(trainer.objectives) == 1 else 4)):
                trainer.step(next(self._batches))
            self._ready = next(self._batches)
        if not parts:
            self._batches = iter(())
        # What workers have read ahead would be a present to a measurement, and they come together.
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
        """Seconds a step, the batch at hand; an adversary's steps are those of its turns."""
        with self._settings():
            return {"ready": seconds(self.device, lambda: self.trainer.step(self._ready), steps)}

    def measure(self, steps: int) -> dict[str, float]:
        """Seconds a step, on average over some: whole, in parts."""
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
        """Forward and backward on one batch, in an engine like the run's, and nothing else."""
        trainer = self.trainer
        network = trainer.algorithm.network
        cast = partial(autocast, self._precision, self.device)
        with cast():
            prepared = [trainer.algorithm.prepare([trainer.laid_out(b) for b in self._ready])]
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
    """What is timed: the optimizer, Adam, and both done plainly; or algorithms, ERM first."""
    asked, optimizer = options.algorithm or (), options.optimizer
    if asked:
        chosen = [algorithm_spec(name).name for name in asked if name != "all"]
        names = dict.fromkeys((BASELINE, *(algorithm_names() if "all" in asked else chosen)))
        return {name: options.config(images, optimizer, algorithm=name) for name in names}
    optimizers = tuple(dict.fromkeys((optimizer, ADAM)))
    configs = {name: options.config(images, name) for name in optimizers}
    # On a CPU the engine is off and images stay on the host anyway.
    adam = configs[ADAM]
    if (
        options.where.type != "cpu"
        or resolve(adam.precision, options.where, adam.optimizer) != "fp32"
    ):
        for name in optimizers:
            configs[f"{name}, plain"] = options.config(images, name, **PLAIN)
    return configs


def measure(options: Options) -> Result:
    device = options.where
    with (
        packed_images(options.images) as images,
        tempfile.TemporaryDirectory(prefix="steppe-bench-") as out,
    ):
        configs = contenders(options, images)
        ready = harness.track(configs.items(), f"{options.backbone}: getting ready")
        runners = {name: Runner(config, Path(out), not options.algorithm) for name, config in ready}
        turns = {
            name: partial(runner.alone if options.algorithm else runner.measure, options.steps)
            for name, runner in runners.items()
        }
        found = harness.take_turns(turns, options.rounds, options.backbone)
        runs = {name: runner.about() for name, runner in runners.items()}
        network = next(iter(runners.values())).trainer.algorithm
        parameters = sum(p.nbytes for p in network.parameters())
        del runners, turns, network  # their memory is not to be counted as another's
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
        "data": name_of(options.images),
        "rounds": options.rounds,
        "steps a round": options.steps,
        "runs": runs,
        "ratios": {f"{a} over {b}": ratio(times[a], times[b]) for a, b in pairs},
    }
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result["peak GiB of the process"] = round(peak / 2**30, 3)
    elif not options.algorithm:
        more = runs[first]["peak GiB"] - runs[ADAM]["peak GiB"]
        result["memory over adam, in parameter-sized buffers"] = round(more * 2**30 / parameters, 3)
    return result


def _figures(rows: Sequence[dict[str, float]], options: Options, passes: int) -> Result:
    """One way of training, over the rounds."""
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
    if options.where.type == "cpu":  # a GPU's host does not wait for the update, and cannot tell
        figures["ms in forward, backward, optimizer"] = lambda r: 1e3 * r["update"]
        figures["overhead"] = lambda r: 1 - r["update"] / r["whole"]
    if options.algorithm:
        figures = {AT_HAND: figures[AT_HAND]}
    return {name: spread([figure(row) for row in rows]) for name, figure in figures.items()}


def _peak(config: RunConfig, out: Path, device: torch.device) -> int:
    """Bytes of a GPU that a run takes at most, from its beginning to its captured steps.

    When others have run: libraries have the workspaces that the first to come would pay for.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    # What was asked for: what the allocator rounds it up to depends on what was free.
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    Runner(config, out)
    harness.wait(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)


main = command(Options, measure)
