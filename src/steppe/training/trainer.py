"""The loop: one batch of every source domain a step, an evaluation at every checkpoint.

The state is everything that the next step depends on, so that a run that was killed goes on as if
nothing had happened.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steppe import __version__
from steppe.algorithms import Algorithm, Losses, algorithm_spec
from steppe.averaging import build_averaging, reestimate, unfrozen
from steppe.domains import seed_hash
from steppe.domains.batches import Batch, Sampling, View
from steppe.domains.store import open_store
from steppe.errors import Diverged, Interrupted, RunError, UserError
from steppe.validation import first_best

from . import checkpoint, precision, randomness, setup
from .config import RunConfig
from .directory import RunDirectory, validation_accuracy
from .evaluation import BATCH, LARGE_BATCH
from .execution import Engine
from .interrupts import Interrupts
from .loggers import Logger, flatten, open_loggers
from .means import Means
from .processes import Processes
from .progress import Display, summary
from .scoring import Scoring, worst
from .update import cut, forget, mean_state, take_up

log = logging.getLogger("steppe")

_TITLES = {"main": "total"}
"""What records call an objective's loss, where it is not the objective's name."""
DIVERGENCE_STEPS = 50
"""On a GPU, reading the loss makes the host wait: it is looked at this often."""
AGREEMENT_STEPS = 10
"""With several processes, how often they ask each other whether one was told to stop."""
STATISTICS_STEPS = 500
"""Batches from which an average's batch-norm statistics are estimated, as in SWAD's code."""


class Trainer:
    """The state of a run, and what is done to it.

    Args:
        config: the run.
        run: its folder.
        processes: this process among the others.
        display: where progress goes.
    """

    def __init__(
        self, config: RunConfig, run: RunDirectory, processes: Processes, display: Display
    ) -> None:
        self.config, self.dir, self.processes, self.display = config, run, processes, display
        self.device = processes.device
        setup.check_processes(config, processes)
        self.dataset, self.splits = setup.open_data(config)
        sources = tuple(split for split in self.splits if split.source)
        self.sampling = Sampling(
            sources,
            config.batch_size,
            View(config.image_size, config.augment),
            config.seed,
            processes.rank,
            processes.world,
        )
        share = config.batch_size // processes.world
        if share % config.accumulate:
            raise UserError(
                f"batch_size={config.batch_size} over {processes.world} processes cannot be cut "
                f"into accumulate={config.accumulate} equal parts"
            )
        algorithm_spec(config.algorithm.name).check_batch(share // config.accumulate)
        self.precision = setup.resolved_precision(config, self.device)
        gears = setup.gears(config, processes)
        self.store = open_store(
            config.data,
            self.device,
            [split.domain for split in self.splits],
            config.workers,
            processes.world,
            compiled=gears.compiled,
        )

        randomness.seed_all(config.seed)
        n_classes, channels = len(self.dataset.classes), self.dataset.spec.channels
        # A run that goes on has its weights: the file it began with may be gone.
        begun = checkpoint.any_saved(run.checkpoints)
        start = config.model_copy(update={"weights": "none"}) if begun else config
        self.algorithm = setup.build(start, n_classes, channels, len(sources)).to(self.device)
        self.memory_format = setup.memory_format(
            self.algorithm, config.image_size, self.precision, self.device
        )
        self.algorithm.to(memory_format=self.memory_format)
        if processes.rank:  # from here on, other draws than process 0 (dropout)
            randomness.seed_all(seed_hash(config.seed, processes.rank))
        self.objectives = tuple(self.algorithm.objectives())
        self.parallel = setup.parallel(self.algorithm, processes, len(self.objectives) > 1)
        self.optimizers = {
            objective.name: setup.optimizer(
                config.optimizer, objective, self.parallel, fused=gears.captured
            )
            for objective in self.objectives
            if objective.optimizer is None
        }
        self.scaler = precision.scaler(self.precision, self.device)
        self.engine = Engine(
            gears,
            self.parallel,
            self.algorithm.network,
            self._autocast,
            self.scaler,
            # One size for a run by itself; for all that a search may draw, one code.
            share // config.accumulate * len(sources) if config.draw is None else None,
            config.deterministic,
            say=lambda line: log.info("engine: %s", line) if processes.first else None,
        )
        averaging = config.averaging
        self.averaging = build_averaging(averaging.name, self.algorithm, **averaging.options)
        alone = type(self.algorithm).predict is Algorithm.predict
        batch = LARGE_BATCH if alone and self.device.type == "cuda" else BATCH
        self.scoring = Scoring(config, self.splits, processes, self.store, self._predict, batch)
        if self.averaging.follows_loss and not self.scoring.validates:
            raise UserError(
                f"averaging {averaging.name!r} follows the validation loss, and the source domains "
                "have no validation images: choose another split or averaging"
            )

        self.done = 0
        """Updates made so far."""
        self.looked = True
        """Whether averaging has seen the validation loss that it wants after the last update."""
        self.recorded = True
        """Whether the record that is due after the last update has been made."""
        self.best: tuple[float, int] | None = None
        self.losses = Means()
        """Of every objective and its parts since the last record."""
        self.update_seconds = 0.0
        """Spent in forward, backward and the optimizer; on a GPU, in launching them."""
        self._loggers: list[Logger] = []
        self._clock, self._clocked = 0.0, 0  # when the last record was made, and after how many

    def run(self, interrupts: Interrupts) -> None:
        """Restores what a checkpoint has, and trains to the end, or until it is told to stop."""
        config = self.config
        if self.processes.first:
            self._check_data()
            resolved = {
                "precision": self.precision,
                "device": str(self.device),
                "engine": self.engine.gear,
                "data": f"{self.dataset.origin}, {self.store.where}",
            }
            self.dir.note(resolved)
            log.info(setup.describe(config, len(self.sampling.sources), resolved))
            log.debug(
                "steppe %s; split %s, validation %s",
                __version__,
                config.split,
                "augmented" if config.augment_validation else "not augmented",
            )
        self._restore()
        if not self.processes.first:
            self.display = Display()
        else:
            values = config.model_dump(mode="json")
            self._loggers = open_loggers(config.loggers, self.dir.path, values, self.done > 0)
            for record in self.dir.records():  # what a killed process may not have sent
                self._tell_loggers(record)
        axes = (config.algorithm.name, config.optimizer.name, config.averaging.name)
        method = ", ".join(name for name in axes if name not in ("ERM", "none"))
        title = f"{Path(config.dataset).name}, {'+'.join(config.targets)} held out, {method}"
        first_due = self.done if self.recorded else self.done - 1
        due = records_due(first_due, config.steps, config.checkpoint_every)
        self.display.start(title, self.done, config.steps, due)
        state = "failed"
        try:
            self._train(interrupts)
            state = "done"
        finally:
            self.display.stop()
            for logger in self._loggers:
                logger.close(state)

    def _check_data(self) -> None:
        """Notes what the run learns from; a resumed run must find the same."""
        facts = setup.data_facts(self.dataset, self.splits)
        if not self.dir.data_file.exists():
            self.dir.write_data(facts)
        elif self.dir.data() != facts:
            raise UserError(
                f"the images of {self.config.dataset} ({self.dataset.origin}) are not those that "
                f"{self.dir.path} was started with: put them back (if a pack was made since, "
                "'--set packed=false' reads the files), or choose another --out"
            )

    def _train(self, interrupts: Interrupts) -> None:
        if interrupts.number is not None and self.processes.world == 1:
            raise Interrupted(interrupts.number)  # during the set-up: nothing is new
        self._clock, self._clocked = time.perf_counter(), self.done
        self._settle(interrupts)
        if self.averaging.finished:
            return
        for batches in self.store.training(self.sampling, self.done, self.config.steps):
            with _determinism_explained():
                self.step(batches)
            step = self.done - 1
            self.looked = not self.averaging.due(step, last=self._last)
            self.recorded = not self._due(step)
            self.display.step(self.done)
            self.check_divergence()
            self._stop_if_asked(interrupts)
            self._settle(interrupts)
            if self.averaging.finished:
                log.info("the average is complete after step %d: training ends here", step)
                return

    @property
    def _last(self) -> bool:
        """Whether no update follows."""
        return self.done == self.config.steps or self.averaging.finished

    def _due(self, step: int) -> bool:
        """Whether a record is made after a step, as DomainBed counts."""
        return step % self.config.checkpoint_every == 0 or step + 1 == self.config.steps

    def _settle(self, interrupts: Interrupts) -> None:
        """Makes the evaluations that are due after the last update."""
        try:
            if not self.looked:
                with self._evaluation_mode():
                    loss = self.scoring.validation_loss(self.done, self.display, interrupts)
                if not math.isfinite(loss):
                    self._diverged(f"the validation loss became {loss} at step {self.done - 1}")
                self.averaging.observe(self.done - 1, loss)
                self.looked = True
                self.recorded = self.recorded and not self.averaging.finished
            if not self.recorded:
                self._record(interrupts)
        except Interrupted:
            # The update is made, what follows it is not: the resumed run begins with it.
            self._save()
            raise

    def step(self, batches: Sequence[Batch]) -> None:
        """One update, from one batch of every source domain."""
        parts = cut([self.laid_out(batch) for batch in batches], self.config.accumulate)
        with self._autocast():
            prepared = [self.algorithm.prepare(part) for part in parts]
        firsts: list[dict[str, Losses]] = [{} for _ in prepared]
        for objective in self.objectives:
            if not objective.active(self.done):
                continue
            optimizer = self.optimizers[objective.optimizer or objective.name]
            if objective.reset(self.done):
                forget(optimizer)
                self.engine.forget()
            began = time.perf_counter()
            losses = self.engine.optimize(optimizer, objective.name, prepared)
            self.update_seconds += time.perf_counter() - began
            for first, of_part in zip(firsts, losses, strict=True):
                first[objective.name] = of_part
                self.losses.add({_TITLES.get(objective.name, objective.name): of_part.total})
                self.losses.add(of_part.parts)
        self.algorithm.commit(prepared[0], mean_state(firsts, self.processes))
        self._share_statistics()
        self.averaging.update()
        self.done += 1

    def laid_out(self, batch: Batch) -> Batch:
        """A batch as the network wants it in memory; the algorithm normalizes it."""
        return Batch(batch.images.contiguous(memory_format=self.memory_format), batch.labels)

    def _autocast(self) -> AbstractContextManager[object]:
        return precision.autocast(self.precision, self.device)

    def check_divergence(self) -> None:
        """Stops a run whose loss is no longer finite."""
        step = self.done - 1
        if self.device.type == "cuda" and step % DIVERGENCE_STEPS:
            return
        if (value := self.losses.not_finite()) is not None:
            self._diverged(f"the loss became {value} at step {step} or shortly before")

    def _diverged(self, what: str) -> None:
        raise Diverged(
            f"{what}: the run diverged. Records and checkpoints so far are kept in "
            f"{self.dir.path}. Try a smaller optimizer.lr"
            + (" or precision=fp32" if self.precision in ("fp16", "bf16") else "")
            + ", in another --out."
        )

    def _stop_if_asked(self, interrupts: Interrupts) -> None:
        number = interrupts.number
        if self.processes.world > 1:
            if self.done % AGREEMENT_STEPS:
                return
            if self.processes.any(number is not None):
                numbers = [n for n in self.processes.gather(number) if n is not None]
                number = numbers[0]
        if number is not None:
            self._save()
            raise Interrupted(number)

    def _record(self, interrupts: Interrupts) -> None:
        """Evaluates, appends the record and saves the state."""
        step, config = self.done - 1, self.config
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # updates that are under way are no evaluation
        started = time.perf_counter()
        seconds = (started - self._clock) / max(self.done - self._clocked, 1)
        if self._last:
            self._finish_average(interrupts)
        averaged = self.averaging.serving
        with self._evaluation_mode(), self.averaging.applied():
            domains = self.scoring.everything(self.done, self.display, interrupts, averaged)
        means = self.losses.take(lambda sums: self.processes.sum(sums) / self.processes.world)
        smallest = min(len(split.larger) for split in self.splits)
        record: dict[str, Any] = {
            "step": step,
            "epoch": step * config.batch_size / smallest,
            "loss": means,
            "domains": domains,
            "worst_accuracy": worst(domains),
            "averaged": averaged,
            "seconds_per_step": seconds,
            "evaluation_seconds": time.perf_counter() - started,
            "memory_gb": _peak_memory(self.device),
        }
        flat = flatten(record)
        wrong = [name for name, value in flat.items() if not math.isfinite(value)]
        if wrong:
            held_out = tuple(f"domains/{target}/" for target in config.targets)
            learned = [name for name in wrong if not name.startswith(held_out)]
            name = (learned or wrong)[0]
            what = f"{name} became {flat[name]} at step {step}"
            if learned:
                self._diverged(what)
            # No divergence, by which a learning rate may be chosen: that would look at the target.
            raise RunError(f"{what}, on the held-out domain alone: that cannot be recorded")
        self.recorded = True
        # An average that is only made at the end is what the run is for, whatever came before it.
        candidate = averaged or not self.averaging.follows_loss
        value = validation_accuracy(record) if candidate else None
        so_far = None if self.best is None else self.best[0]
        better = value is not None and first_best([so_far, value]) == 1
        if value is not None and better:
            self.best = (value, step)
        if self.processes.first:
            self.dir.append(record)
            if value is not None and better:
                with self.averaging.applied():
                    weights = self.algorithm.state_dict()
                    checkpoint.save_best(self.dir.checkpoints, step, weights, value)
        self._save()
        self.display.record(record)
        log.debug("%s", summary(record))
        self._tell_loggers(record)
        self._clock, self._clocked = time.perf_counter(), self.done

    def _tell_loggers(self, record: Mapping[str, Any]) -> None:
        values = {name: value for name, value in flatten(record).items() if name != "step"}
        for logger in self._loggers:
            logger.record(record["step"], values)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self.algorithm.eval()
        try:
            yield
        finally:
            self.algorithm.train()

    def _finish_average(self, interrupts: Interrupts) -> None:
        """Settles the average, and estimates batch-norm statistics that it has none of."""
        self.averaging.finish()
        if self.processes.first and self.averaging.outcome():
            log.info("%s: %s", self.config.averaging.name, self.averaging.outcome())
        if not self.averaging.needs_statistics:
            return
        steps = min(STATISTICS_STEPS, self.config.steps)
        total = steps * self.config.batch_size * len(self.sampling.sources)

        def images() -> Iterator[Tensor]:
            batches = self.store.training(self.sampling, 0, steps)
            for number, domains in enumerate(batches, start=1):
                self.display.evaluating(number * total // steps, total)
                if interrupts.number is not None and self.processes.world == 1:
                    raise Interrupted(interrupts.number)
                yield torch.cat([batch.images for batch in domains])

        with self.averaging.applied():
            reestimate(self.algorithm, self._predict, images())
            self._share_statistics()

    def _share_statistics(self) -> None:
        """Gives all processes the mean of their batch-norm statistics: a run has one network."""
        if self.processes.world == 1:
            return
        norms = unfrozen(self.algorithm)
        found = [t for norm in norms for t in (norm.running_mean, norm.running_var)]
        shared = [t for t in found if t is not None]
        if shared:
            flat = torch.cat([t.flatten() for t in shared]) / self.processes.world
            means = self.processes.sum(flat).split([t.numel() for t in shared])
            for statistic, mean in zip(shared, means, strict=True):
                statistic.copy_(mean.view_as(statistic))

    def _predict(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=self.memory_format)
        images = self.algorithm.network.normalize(images)

        def predict() -> Tensor:
            with self._autocast():
                return self.algorithm.predict(images)

        return self.engine.guarded(predict)

    def _save(self) -> None:
        # One process's generators and losses are not another's: all of them are kept.
        generators = self.processes.gather(randomness.get_state(self.device))
        losses = self.processes.gather(self.losses.state_dict())
        if not self.processes.first:
            return
        state = {
            "done": self.done,
            "looked": self.looked,
            "recorded": self.recorded,
            "records_size": self.dir.records_size(),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "precision": self.precision,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "averaging": self.averaging.state_dict(),
            "best": self.best,
            "losses": losses,
            "generators": generators,
        }
        checkpoint.save(self.dir.checkpoints, self.done - 1, self.algorithm.state_dict(), state)

    def _restore(self) -> None:
        if self.processes.first:
            checkpoint.clean(self.dir.checkpoints)
        self.processes.gather(None)
        found = checkpoint.load_last(self.dir.checkpoints)
        if self.processes.first:
            self.dir.cut_records(found.state["records_size"] if found else 0)
        if found is None:
            return
        state = found.state
        if len(state["generators"]) != self.processes.world:
            raise UserError(
                f"{self.dir.path} was trained by {len(state['generators'])} processes and can be "
                f"resumed by as many, not by {self.processes.world}"
            )
        self.algorithm.load_state_dict(found.model)
        for name, optimizer in self.optimizers.items():
            take_up(optimizer, state["optimizers"][name])
        if self.scaler and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        before = state.get("precision", self.precision)
        if before != self.precision and self.processes.first:
            log.warning(
                "%s was trained in %s so far and goes on in %s, which precision=auto is on %s",
                self.dir.path,
                before,
                self.precision,
                self.device,
            )
        losses = state["losses"]
        if found.format > 1:  # before, there was no averaging, and the first process's losses
            self.averaging.load_state_dict(state["averaging"])
            self.looked = state["looked"]
            losses = losses[self.processes.rank]
        self.done, self.recorded = state["done"], state["recorded"]
        self.best = state["best"]
        self.losses.load_state_dict(losses, self.device)
        randomness.set_state(state["generators"][self.processes.rank], self.device)
        log.info("resumed after step %d from %s", found.step, found.path)


def records_due(first: int, steps: int, every: int) -> int:
    """How many records are made from a step on: of every so many steps one, and of the last.

    Examples:
        >>> records_due(0, 21, 10), records_due(0, 22, 10), records_due(11, 22, 10)
        (3, 4, 2)
    """
    if first >= steps:
        return 0
    regular = (steps - 1) // every - (first - 1) // every
    return regular + ((steps - 1) % every > 0)


@contextmanager
def _determinism_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "does not have a deterministic implementation" not in text:
            raise
        raise RunError(
            f"--deterministic: torch cannot repeat {text.split()[0]!r} bit for bit on a GPU. "
            "Choose another backbone, or go without --deterministic in another --out."
        ) from error


def _peak_memory(device: torch.device) -> float:
    """Gigabytes: of the GPU where there is one, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
