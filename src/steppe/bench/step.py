"""`steppe bench step`: what a step of a run costs.

The same batches and steps as in `steppe train`, from packed images, with everything that belongs to
a step: reading, augmenting, moving, normalizing, all passes, the optimizer, counting. Beside it:
the same step in parts, Adam in the same engine, and the same optimizer done plainly (eager,
fp32, images transformed by Pillow). For several algorithms: how their steps compare with ERM's.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from steppe.domains import load
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.optim import optimizer_spec
from steppe.training import RunConfig, RunDirectory, make_config
from steppe.training.execution import WARM_UP, Engine, Gears
from steppe.training.precision import autocast, settings
from steppe.training.processes import Processes
from steppe.training.setup import resolved_precision
from steppe.training.trainer import Trainer
from steppe.training.update import Passes

from .data import packed_images
from .record import environment
from .still import Still

ADAM = "adam"
"""The optimizer that others are compared with."""
BASELINE = "ERM"
"""What other algorithms are compared with."""
UNENDING = 10**9
"""Steps that are never reached."""
_COLUMNS = ("median", "min", "max")


@dataclass(frozen=True)
class Setting:
    """What is the same for everything that is timed together.

    Attributes:
        device: where.
        images: a folder ``domain/class/image`` that is packed.
        backbone: any that a run knows.
        batch: images in a step, of all source domains.
        deterministic: as in a run.
    """

    device: torch.device
    images: Path
    backbone: str
    batch: int
    deterministic: bool = False

    def config(
        self,
        optimizer: str,
        precision: str = "auto",
        engine: Literal["auto", "off"] = "auto",
        data: Literal["auto", "host"] = "auto",
        algorithm: str = BASELINE,
    ) -> RunConfig:
        """A run, the last domain held out.

        No weights are needed to time it; batch norm that is frozen is usual.
        """
        *sources, target = (domain.name for domain in load(self.images).domains)
        if self.batch % len(sources):
            raise UserError(f"--batch {self.batch} is not a multiple of {len(sources)} domains")
        return make_config(
            {
                "dataset": str(self.images),
                "targets": [target],
                "backbone": self.backbone,
                "weights": "none",
                "freeze_bn": True,
                "algorithm": algorithm,
                "optimizer": {"name": optimizer, "lr": 1e-4},
                "batch_size": self.batch // len(sources),
                "device": str(self.device),
                "precision": precision,
                "engine": engine,
                "data": data,
                "deterministic": self.deterministic,
            }
        )


class Runner:
    """One way of training, ready to be timed: warmed up, compiled, captured.

    Args:
        config: the run.
        out: a folder for it; nothing is written.
    """

    def __init__(self, config: RunConfig, out: Path) -> None:
        self.device = torch.device(config.device)
        self._deterministic = config.deterministic
        self._precision = resolved_precision(config, self.device)
        with self._settings():
            self.trainer = Trainer(
                config, RunDirectory(out), Processes(self.device), self._precision
            )
            trainer = self.trainer
            self._batches = trainer.store.training(trainer.sampling, 0, UNENDING)
            for _ in range(WARM_UP + 2):
                trainer.step(next(self._batches))
            self._ready = next(self._batches)
        # What workers have read ahead would be a present to a measurement, and they come together.
        workers = getattr(trainer.store, "workers", 0)
        self._ahead, self._workers = 2 * workers + 1, max(1, workers)
        self._passes: Callable[[], object] | None = None

    def about(self) -> dict[str, Any]:
        """How it trains, in words."""
        trainer = self.trainer
        name = trainer.config.optimizer.name
        return {
            "optimizer": name,
            "passes": optimizer_spec(name).passes,
            "precision": trainer.precision,
            "engine": trainer.engine.gear,
            "reasons": list(trainer.engine.reasons),
            "images": trainer.store.where,
        }

    def measure(self, steps: int) -> dict[str, float]:
        """Seconds a step, on average over some: whole, in parts."""
        with self._settings():
            self._seconds(self._whole, self._ahead)
            self.trainer.update_seconds = 0.0
            whole = self._seconds(self._whole, steps)
            update = self.trainer.update_seconds / steps
            ready = self._seconds(lambda: self.trainer.step(self._ready), steps)
            if self._passes is None:
                self._passes = self._prepare_passes()
            one_pass = self._seconds(self._passes, steps)
            self.trainer.parallel.zero_grad()
            self._seconds(lambda: next(self._batches), self._ahead)
            rounds = max(2, -(-steps // self._workers)) * self._workers
            data = self._seconds(lambda: next(self._batches), rounds)
        return {"whole": whole, "update": update, "ready": ready, "pass": one_pass, "data": data}

    def _whole(self) -> None:
        self.trainer.step(next(self._batches))
        self.trainer.check_divergence()

    def _seconds(self, run: Callable[[], object], times: int) -> float:
        _wait(self.device)
        began = time.perf_counter()
        for _ in range(times):
            run()
        _wait(self.device)
        return (time.perf_counter() - began) / times

    def _prepare_passes(self) -> Callable[[], object]:
        """Forward and backward on one batch, in an engine like the run's, and nothing else."""
        trainer = self.trainer
        network, parameters = trainer.algorithm.network, trainer.parallel.parameters()
        batches = [trainer.laid_out(batch) for batch in self._ready]

        def cast() -> AbstractContextManager[object]:
            return autocast(self._precision, self.device)

        with cast():
            prepared = [trainer.algorithm.prepare(batches)]
        gears = Gears(trainer.engine.compiled, trainer.engine.captured)
        engine = Engine(
            gears,
            Passes(trainer.parallel, cast),
            network,
            batch=network.compiled.batch if network.compiled else None,
            deterministic=self._deterministic,
        )
        idle = Still(parameters)

        def run() -> object:
            return engine.optimize(idle, trainer.objectives[0].name, prepared)

        for _ in range(WARM_UP + 2):
            run()
        return run

    def _settings(self) -> AbstractContextManager[None]:
        return settings(self._precision, self._deterministic)


def measure(
    device: torch.device,
    backbone: str,
    batch: int,
    optimizer: str,
    rounds: int,
    steps: int,
    precision: str = "auto",
    deterministic: bool = False,
    eager: bool = False,
    images: Path | None = None,
) -> dict[str, Any]:
    """Everything `steppe bench step` reports, as plain values.

    Args:
        device: where.
        backbone: any that a run knows.
        batch: images in a step, of all source domains.
        optimizer: any from the registry.
        rounds: how often everything takes its turn.
        steps: in a turn.
        precision: of the run, and of Adam beside it.
        deterministic: as in a run.
        eager: whether these two do without the engine.
        images: a folder ``domain/class/image``; photograph-sized images are made unless given.
    """
    console = Console(stderr=True)
    with (
        packed_images(images, console=console) as folder,
        tempfile.TemporaryDirectory(prefix="steppe-bench-") as out,
        Progress(console=console, transient=True) as progress,
    ):
        setting = Setting(device, folder, backbone, batch, deterministic)
        engine: Literal["auto", "off"] = "off" if eager else "auto"
        configs = {
            name: setting.config(name, precision, engine)
            for name in dict.fromkeys((optimizer, ADAM))
        }
        plain = f"{optimizer}, plain"
        # On a CPU the engine is off and images stay on the host anyway.
        if device.type != "cpu" or resolved_precision(configs[optimizer], device) != "fp32":
            for name in dict.fromkeys((optimizer, ADAM)):
                configs[f"{name}, plain"] = setting.config(name, "fp32", "off", "host")
        bar = progress.add_task("", total=len(configs) * (rounds + 1))
        runners: dict[str, Runner] = {}
        for name, config in configs.items():
            progress.update(bar, description=f"{backbone}, {name}: getting ready")
            runners[name] = Runner(config, Path(out))
            progress.advance(bar)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
        for _ in range(rounds):
            for name, runner in runners.items():
                progress.update(bar, description=f"{backbone}, {name}")
                found[name].append(runner.measure(steps))
                progress.advance(bar)
        about = {name: runner.about() for name, runner in runners.items()}
        parameters = sum(p.nbytes for p in runners[optimizer].trainer.algorithm.parameters())
        del runners, runner  # their memory is not to be counted as another's
        peaks = _peaks(configs, Path(out), device)
    result: dict[str, Any] = {
        "environment": environment(device),
        "backbone": backbone,
        "optimizer": optimizer,
        "batch": f"{batch // configs[optimizer].batch_size} x {configs[optimizer].batch_size}",
        "deterministic": deterministic,
        "data": "doodles, enlarged" if images is None else images.resolve().name,
        "rounds": rounds,
        "steps a round": steps,
        "runs": {
            name: {**about[name], **_figures(rows, batch, about[name]["passes"], device)}
            for name, rows in found.items()
        },
        "ratios": {
            f"{optimizer} over {other}": _ratio(found[optimizer], found[other])
            for other in found
            if other != optimizer
        },
    }
    if plain not in found:
        result["plain"] = f"{optimizer} is trained plainly here: there is nothing to compare with"
    if device.type == "cuda":
        for name, peak in peaks.items():
            result["runs"][name]["peak GiB"] = round(peak / 2**30, 3)
        result["memory over adam, in parameter-sized buffers"] = round(
            (peaks[optimizer] - peaks[ADAM]) / parameters, 3
        )
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result["peak GiB of the process"] = round(peak / 2**30, 3)
    return result


def _figures(
    rows: Sequence[dict[str, float]], batch: int, passes: int, device: torch.device
) -> dict[str, Any]:
    """One way of training, over the rounds."""
    figures: dict[str, Any] = {
        "ms per step": _spread([1e3 * r["whole"] for r in rows]),
        "images per second": _spread([batch / r["whole"] for r in rows]),
        "ms per forward and backward": _spread([1e3 * r["pass"] for r in rows]),
        "step over its passes": _spread([r["whole"] / (passes * r["pass"]) for r in rows]),
        "ms per step, batch at hand": _spread([1e3 * r["ready"] for r in rows]),
        "batch at hand, over its passes": _spread(
            [r["ready"] / (passes * r["pass"]) for r in rows]
        ),
        "ms of data alone": _spread([1e3 * r["data"] for r in rows]),
        "data alone over step": _spread([r["data"] / r["whole"] for r in rows]),
        "share that data adds to a step": _spread([1 - r["ready"] / r["whole"] for r in rows]),
    }
    if device.type == "cpu":  # a GPU's host does not wait for the update, and cannot tell
        figures["ms in forward, backward, optimizer"] = _spread([1e3 * r["update"] for r in rows])
        figures["overhead"] = _spread([1 - r["update"] / r["whole"] for r in rows])
    return figures


def _ratio(
    ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]
) -> dict[str, float]:
    return _spread([a["whole"] / b["whole"] for a, b in zip(ours, theirs, strict=True)])


def _peaks(configs: dict[str, RunConfig], out: Path, device: torch.device) -> dict[str, int]:
    """Bytes of a GPU that each run takes at most, from its beginning to its captured steps.

    One after another, when libraries have the workspaces that the first to come would pay for.
    """
    if device.type != "cuda":
        return {}
    peaks = {}
    for name, config in configs.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        # What was asked for: what the allocator rounds it up to depends on what was free.
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        runner = Runner(config, out)
        _wait(device)
        peaks[name] = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
        del runner
    return peaks


def compare(
    device: torch.device,
    backbone: str,
    batch: int,
    optimizer: str,
    rounds: int,
    steps: int,
    precision: str,
    names: Sequence[str],
    eager: bool = False,
    images: Path | None = None,
) -> dict[str, Any]:
    """The steps of algorithms over ERM's: a turn of each in every round, so that noise is shared.

    Batches are made before the clock starts: what is compared is the step alone. An adversary's
    steps are those of its turns, on average.
    """
    names = list(dict.fromkeys((BASELINE, *names)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    # Both sides of an adversary's game are captured after steps of their own.
    warm_up = steps if device.type == "cpu" else max(steps, 4 * (WARM_UP + 2))
    console = Console(stderr=True)
    with (
        packed_images(images, console=console) as folder,
        tempfile.TemporaryDirectory() as out,
        Progress(console=console, transient=True) as progress,
    ):
        setting = Setting(device, folder, backbone, batch)
        configs = {
            name: setting.config(optimizer, precision, "off" if eager else "auto", algorithm=name)
            for name in names
        }
        number_format = resolved_precision(configs[BASELINE], device)
        bar = progress.add_task(f"{backbone}, {optimizer}", total=(rounds + 1) * len(names))
        with settings(number_format, deterministic=False):
            trainers = {
                name: Trainer(config, RunDirectory(Path(out)), Processes(device), number_format)
                for name, config in configs.items()
            }
            for round_number in range(rounds + 1):
                for name, trainer in trainers.items():
                    count = steps if round_number else warm_up
                    batches = list(_next_batches(trainer, count))
                    _wait(device)
                    began = time.perf_counter()
                    for domains in batches:
                        trainer.step(domains)
                    trainer.check_divergence()
                    _wait(device)
                    if round_number:  # the first is for warming up
                        seconds[name].append((time.perf_counter() - began) / steps)
                    progress.advance(bar)
        gear = trainers[BASELINE].engine.gear
        reasons = {name: list(t.engine.reasons) for name, t in trainers.items()}
    return {
        "environment": environment(device),
        "backbone": backbone,
        "optimizer": optimizer,
        "batch": f"{batch // configs[BASELINE].batch_size} x {configs[BASELINE].batch_size}",
        "precision": number_format,
        "engine": gear,
        "rounds": rounds,
        "steps a round": steps,
        "algorithms": {
            name: {
                "ms per step": _spread([1e3 * value for value in own]),
                f"over {BASELINE}": _spread(
                    [value / base for value, base in zip(own, seconds[BASELINE], strict=True)]
                ),
                **({"reasons": reasons[name]} if reasons[name] else {}),
            }
            for name, own in seconds.items()
        },
    }


def _next_batches(trainer: Trainer, count: int) -> Iterator[list[Batch]]:
    return islice(trainer.store.training(trainer.sampling, trainer.done, UNENDING), count)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def comparison_tables(result: dict[str, Any]) -> list[Table]:
    """The comparison for the terminal."""
    title = f"{result['backbone']}, {result['optimizer']}, batch {result['batch']}"
    table = Table("", "ms per step", f"over {BASELINE}", "min", "max", title=title)
    for name, of_one in result["algorithms"].items():
        ratio = of_one[f"over {BASELINE}"]
        shares = (f"{ratio[key]:.2f}" for key in _COLUMNS)
        table.add_row(name, f"{of_one['ms per step']['median']:.1f}", *shares)
    return [table]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal: medians, and in brackets the least and the most."""
    runs = result["runs"]
    title = f"{result['backbone']}, batch {result['batch']}, {result['data']}"
    table = Table("", *runs, title=title)
    for key in ("precision", "engine", "images", "passes"):
        table.add_row(key, *(str(run[key]) for run in runs.values()))
    for key in next(iter(runs.values())):
        cells = [run[key] for run in runs.values()]
        if isinstance(cells[0], dict):
            table.add_row(key, *(_cell(cell) for cell in cells))
    if "peak GiB" in next(iter(runs.values())):
        table.add_row("peak GiB", *(f"{run['peak GiB']:.2f}" for run in runs.values()))
    ratios = Table("ratio of whole steps", "")
    for name, spread in result["ratios"].items():
        ratios.add_row(name, _cell(spread))
    over = "memory over adam, in parameter-sized buffers"
    if over in result:
        ratios.add_row(over, f"{result[over]:.2f}")
    for name, run in runs.items():
        for reason in run["reasons"]:
            ratios.add_row(name, reason)
    if "plain" in result:
        ratios.add_row("plain", result["plain"])
    return [table, ratios]


def _cell(spread: dict[str, float]) -> str:
    digits = 1 if spread["median"] >= 10 else 3
    median, least, most = (f"{spread[key]:,.{digits}f}" for key in _COLUMNS)
    return f"{median} ({least} to {most})"
