"""The training loop: one batch per source domain and step, an evaluation at every checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steppe import __version__
from steppe.algorithms import Algorithm, Losses
from steppe.algorithms.algorithm import LINEAR
from steppe.averaging import averaging_spec, build_averaging, reestimate
from steppe.domains import seed_hash
from steppe.domains.batches import Batch, Sampling, View
from steppe.domains.store import open_store
from steppe.errors import Diverged, Interrupted, RunError, UserError

from . import checkpoint, initial, precision, randomness, setup, snapshot, tuning
from .config import RunConfig
from .directory import RunDirectory
from .evaluation import BATCH, LARGE_BATCH
from .execution import Engine
from .interrupts import Interrupts
from .means import Means
from .probe import probe_sources
from .processes import Processes
from .progress import Display
from .recorder import Recorder, peak_memory, records_due
from .schedules import SCHEDULES, drop
from .scoring import Scoring, Watch, worst
from .second_stage import FirstStage
from .update import Passes, cut, forget, mean_state, share_statistics
from .warm_start import first_change, with_warm_start

log = logging.getLogger("steppe")

_TITLES = {"main": "total"}
"""Names of objectives' losses in records, where they differ from the objectives' names."""
DIVERGENCE_STEPS = 50
"""Steps between divergence checks on a GPU, where reading the loss synchronizes."""
AGREEMENT_STEPS = 10
"""Steps between checks whether any of several processes was interrupted."""
STATISTICS_STEPS = 500
"""Batches for estimating an average's batch-norm statistics, as in SWAD's code."""


class Trainer:
    """The state of a run, and the steps that advance it.

    `number_format` comes from `precision.resolve`; progress goes nowhere by default. A second stage
    repeats what `first_stage` chose.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        processes: Processes,
        number_format: str,
        display: Display | None = None,
        first_stage: FirstStage | None = None,
    ) -> None:
        self.config, self.dir, self.processes = config, run, processes
        self.display = display if display is not None and processes.first else Display()
        self.device, self.precision = processes.device, number_format
        self.interrupts = Interrupts()
        part = setup.part_size(config, processes)
        self.dataset, self.splits = setup.open_data(config)
        sources = tuple(split for split in self.splits if split.source)
        view = View(config.image_size, config.augment)
        self.sampling = Sampling(
            sources, config.batch_size, view, config.seed, processes.rank, processes.world
        )
        gears = setup.gears(config, processes)
        self.store = open_store(
            config.data,
            self.device,
            [split.domain for split in self.splits],
            config.workers,
            processes.world,
            compiled=gears.compiled,
            captured=gears.captured,
        )
        self._build(len(sources))
        self.objectives = with_warm_start(self.algorithm, config.linear_steps, config.linear_lr)
        lr_factors = tuning.lr_factors(self.algorithm.network, config.lr_decay)
        self.parallel = setup.parallel(self.algorithm, processes, len(self.objectives) > 1)
        self.optimizers = {
            objective.name: setup.optimizer(
                config.optimizer,
                objective,
                self.parallel,
                fused=gears.captured,
                facts={"seed": config.seed, "domains": len(sources)},
                lr_factors=lr_factors,
            )
            for objective in self.objectives
            if objective.optimizer is None
        }
        self.scaler = precision.scaler(self.precision, self.device)
        self.engine = Engine(
            gears,
            Passes(self.parallel, self._autocast, self.scaler),
            self.algorithm.network,
            # A single run compiles for its batch size; the samples of a search share their code.
            batch=part * len(sources) if config.draw is None else None,
            deterministic=config.deterministic,
            say=lambda line: log.info("engine: %s", line) if processes.first else None,
        )
        own = type(self.algorithm).prepare is not Algorithm.prepare
        self._draws = own or self.algorithm.network.dropout > 0
        """Whether preparing a step may draw random numbers or decide on the host."""
        whole = averaging_spec(config.averaging.name).cls.follows_loss
        self._averages_from = first_change(self.objectives, config.steps, whole=whole)
        """The first step that changes the network, if something else is trained before it."""
        self.averaging = build_averaging(
            config.averaging.name,
            self.algorithm,
            steps=config.steps - self._averages_from,
            **config.averaging.options,
        )
        alone = not self.algorithm.mixes_images()
        batch = LARGE_BATCH if alone and self.device.type == "cuda" else BATCH
        self.scoring = Scoring(
            config,
            self.splits,
            processes,
            self.store,
            self._predict,
            watch=self._watch,
            batch=batch,
        )
        self.first_stage = first_stage
        self.schedule = first_stage.schedule if first_stage else SCHEDULES[config.lr_schedule]()
        if not self.scoring.validates:
            setup.refuse_validation(
                {
                    f"averaging {config.averaging.name!r}": self.averaging.follows_loss,
                    f"lr_schedule {config.lr_schedule!r}": self.schedule.needs_loss,
                    "linear_probe": config.linear_probe and first_stage is None,
                }
            )
        self.probe: dict[str, float] | None = None
        """What the linear probe chose, for the first record."""
        self.recorder = Recorder(config, run, processes, self.display)

        self.done = 0
        """Number of updates so far."""
        self.looked = True
        """Whether averaging has seen the validation loss due after the last update."""
        self.recorded = True
        """Whether the record due after the last update exists."""
        self.losses = Means()
        """Losses of every objective and its parts since the last record."""
        self.update_seconds = 0.0
        """Time in forward, backward and the optimizer; on a GPU, the time to launch them."""

    def _build(self, n_sources: int) -> None:
        """Build the seeded algorithm on its device, in its memory format."""
        config, processes = self.config, self.processes
        begun = checkpoint.any_saved(self.dir.checkpoints)
        start = config.model_copy(update=checkpoint.REPLACES) if begun else config
        classes, channels = self.dataset.classes, self.dataset.spec.channels
        self.algorithm = initial.initialize(start, classes, channels, n_sources).to(self.device)
        self.memory_format = setup.memory_format(
            self.algorithm, config.image_size, self.precision, self.device
        )
        self.algorithm.to(memory_format=self.memory_format)
        if processes.rank:  # from here on, draw differently from process 0 (dropout)
            randomness.seed_all(seed_hash(config.seed, processes.rank))
        elif initial.init_seed(config) != config.seed:
            randomness.seed_all(config.seed)

    def run(self, interrupts: Interrupts) -> None:
        """Restore the last checkpoint, and train to the end or until interrupted."""
        self.interrupts = interrupts
        config = self.config
        if self.processes.first:
            self._note_settings()
        snapshot.restore(self)
        axes = (config.algorithm.name, config.optimizer.name, config.averaging.name)
        method = ", ".join(name for name in axes if name not in ("ERM", "none"))
        title = f"{Path(config.dataset).name}, {'+'.join(config.targets)} held out, {method}"
        title += ", second stage" if self.first_stage else ""
        first_due = self.done if self.recorded else self.done - 1
        due = records_due(first_due, config.steps, config.checkpoint_every)
        with self.recorder.recording(resumed=self.done > 0):
            self.display.start(title, self.done, config.steps, due)
            try:
                if not self.done and config.linear_probe:
                    self._start_from_probe(self.first_stage.probe if self.first_stage else None)
                self._train()
            finally:
                self.display.stop()

    def _start_from_probe(self, chosen: Mapping[str, float] | None) -> None:
        """Fit the classifier to the features of the source images, in the first process."""
        classifier, found = self.algorithm.network.classifier, None
        if not classifier.weight.requires_grad:
            raise UserError(
                f"linear_probe would replace the classifier, which {self.config.algorithm.name} "
                "keeps: leave it out"
            )
        if self.processes.first:
            with self._evaluation_mode():
                batches = self.scoring.source_batches
                found = probe_sources(classifier, self._predict, batches, chosen)
        found = self.processes.gather(found)[0]
        found.load_into(classifier)
        self.probe = found.to_json()

    def _note_settings(self) -> None:
        """Write the run's data and resolved settings to its folder and log."""
        facts = setup.data_facts(self.dataset, self.splits)
        if not self.dir.data_file.exists():
            self.dir.write_data(facts)
        elif self.dir.data() != facts:
            raise UserError(
                f"the images of {self.config.dataset} ({self.dataset.origin}) are not those that "
                f"{self.dir.path} was started with: restore them (if you have packed them since, "
                "'--set packed=false' reads the files), or choose another --out"
            )
        self.dir.note(self.resolved)
        log.info(setup.describe(self.config, len(self.sampling.sources), self.resolved))
        how = "augmented" if self.config.augment_validation else "not augmented"
        log.debug("steppe %s; split %s, validation %s", __version__, self.config.split, how)

    @property
    def resolved(self) -> dict[str, str]:
        """What the run's `auto` settings became."""
        return {
            "precision": self.precision,
            "device": str(self.device),
            "engine": self.engine.gear,
            "data": f"{self.dataset.origin}, {self.store.where}",
        }

    def _train(self) -> None:
        if self.interrupts.number is not None and self.processes.world == 1:
            raise Interrupted(self.interrupts.number)  # during setup: nothing to save
        self._start_clock()
        self._settle()
        if self._ended:
            return
        for batches in self.store.training(self.sampling, self.done, self.config.steps):
            with _determinism_explained():
                self.step(batches)
            step = self.done - 1
            self.looked = not self._averaging_due
            self.recorded = not self._due(step)
            self.display.step(self.done)
            self.check_divergence()
            self._stop_if_asked()
            self._settle()
            if self._ended and self.done < self.config.steps:
                log.info("%s after step %d: training stops", self._ended, step)
                return

    def _start_clock(self) -> None:
        self._clock, self._clocked = time.perf_counter(), self.done

    @property
    def _ended(self) -> str:
        """Why the run ends before it has made all steps; empty if it does not."""
        if self.averaging.finished:
            return "the average is complete"
        return "the learning rate's schedule ends" if self.schedule.ends(self.done - 1) else ""

    @property
    def _last(self) -> bool:
        return self.done == self.config.steps or bool(self._ended)

    @property
    def _averaging_due(self) -> bool:
        """Whether averaging needs the validation loss after the last update."""
        step = self.done - 1
        return step >= self._averages_from and self.averaging.due(step, last=self._last)

    def _due(self, step: int) -> bool:
        """Whether a record is due after a step, as in DomainBed."""
        return step % self.config.checkpoint_every == 0 or step + 1 == self.config.steps

    def _settle(self) -> None:
        """Make the evaluations due after the last update."""
        step = self.done - 1
        try:
            if self._schedule_due:
                self._look(step)
                self.looked = not self._averaging_due
            if not self.looked:
                self.averaging.observe(step, self._validation_loss(averaged=False))
                self.looked = True
                self.recorded = self.recorded and not self.averaging.finished
            if not self.recorded:
                self._record()
        except Interrupted:
            # The resumed run starts with the evaluations of this update.
            snapshot.save(self)
            raise

    @property
    def _schedule_due(self) -> bool:
        """Whether the learning rates may drop now: at a record, but not in the warm start."""
        begun = self.done > max(self.config.linear_steps, self.schedule.last_look + 1)
        over = self.done == self.config.steps or self.averaging.finished
        return begun and not over and not self.recorded

    def _look(self, step: int) -> None:
        needs = self.schedule.needs_loss
        loss = self._validation_loss(self.averaging.serving) if needs else math.nan
        if not self.schedule.look(step, loss):
            return
        for name, optimizer in self.optimizers.items():
            if name != LINEAR:
                drop(optimizer)
        log.info("the learning rate drops after step %d", step)

    def _validation_loss(self, averaged: bool) -> float:
        """The source validation loss of the average or the raw weights."""
        with self._evaluation_mode(), self.averaging.applied() if averaged else nullcontext():
            loss = self.scoring.validation_loss(self.done, averaged)
        if not math.isfinite(loss):
            self._diverged(f"the validation loss became {loss} at step {self.done - 1}")
        return loss

    def step(self, batches: Sequence[Batch]) -> None:
        """Make one update from one batch per source domain."""
        if self._draws:
            prepared = self._prepare(batches)
        else:
            prepared = self.engine.prepare(self._prepare, batches)
        firsts: list[dict[str, Losses]] = [{} for _ in prepared]
        for objective in self.objectives:
            if objective.optimizer is None:
                setup.change_lr(self.optimizers[objective.name], objective, self.done)
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
        if self.done >= self.config.linear_steps:
            self.algorithm.commit(prepared[0], mean_state(firsts, self.processes))
        share_statistics(self.algorithm, self.processes)
        if self.done >= self._averages_from:
            self.averaging.update()
            if self.averaging.refreshes:
                self._refresh(batches)
        self.done += 1

    @torch.no_grad()
    def _refresh(self, batches: Sequence[Batch]) -> None:
        """Update the average's own batch-norm statistics with the images of a step."""
        with self.averaging.applied():
            for part in cut(batches, self.config.accumulate):
                self._predict(torch.cat([batch.images for batch in part]))
            share_statistics(self.algorithm, self.processes)

    def _prepare(self, batches: Sequence[Batch]) -> list[Any]:
        parts = cut([self.laid_out(batch) for batch in batches], self.config.accumulate)
        with self._autocast():
            return [self.algorithm.prepare(part) for part in parts]

    def laid_out(self, batch: Batch) -> Batch:
        """A batch in the network's memory format."""
        return Batch(batch.images.contiguous(memory_format=self.memory_format), batch.labels)

    def _autocast(self) -> AbstractContextManager[object]:
        return precision.autocast(self.precision, self.device)

    def check_divergence(self) -> None:
        """Stop the run if its loss is no longer finite."""
        step = self.done - 1
        if self.device.type == "cuda" and step % DIVERGENCE_STEPS:
            return
        if (value := self.losses.not_finite()) is not None:
            self._diverged(f"the loss became {value} at step {step} or shortly before")

    def _diverged(self, what: str) -> None:
        raise Diverged(
            f"{what}: the run diverged. {self.dir.path} keeps its records and checkpoints so far. "
            "Try a smaller optimizer.lr"
            + (" or precision=fp32" if self.precision in ("fp16", "bf16") else "")
            + ", in another --out."
        )

    def _stop_if_asked(self) -> None:
        number = self.interrupts.number
        if self.processes.world > 1:
            if self.done % AGREEMENT_STEPS:
                return
            if self.processes.any(number is not None):  # cheaper than to gather every time
                number = next(n for n in self.processes.gather(number) if n is not None)
        if number is not None:
            snapshot.save(self)
            raise Interrupted(number)

    def _watch(self, images: int) -> Watch:
        return Watch(images, self.processes.world, self.display, self.interrupts)

    def _record(self) -> None:
        """Evaluate, append the record and save the state."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # do not count pending updates as evaluation
        began = time.perf_counter()
        if self._last:
            self._finish_average()
        averaged = self.averaging.serving
        with self._evaluation_mode():
            with self.averaging.applied():
                domains = self.scoring.everything(self.done, averaged)
            both = self.config.evaluate_both and averaged
            raw = self.scoring.everything(self.done, averaged=False) if both else None
        smallest = min(len(split.larger) for split in self.splits)
        record = {
            "step": self.done - 1,
            "epoch": (self.done - 1) * self.config.batch_size / smallest,
            "loss": self.losses.take(lambda sums: self.processes.sum(sums) / self.processes.world),
            "domains": domains,
            "worst_accuracy": worst(domains),
            "averaged": averaged,
            **self._further(raw),
            **self._seconds(began),
            "memory_gb": peak_memory(self.device),
        }
        if (wrong := self.recorder.not_finite(record)) is not None:
            self._diverged(wrong)
        self.recorded = True
        # If the average exists only at the end (SWAD), earlier records are not candidates.
        candidate = averaged or not self.averaging.follows_loss
        best = self.recorder.add(record, candidate)
        if best is not None and self.processes.first:
            with self.averaging.applied():
                weights = self.algorithm.state_dict()
                checkpoint.save_best(self.dir.checkpoints, self.done - 1, weights, best)
        snapshot.save(self)
        self.recorder.tell(record)
        self._start_clock()

    def _further(self, raw: dict[str, Any] | None) -> dict[str, Any]:
        """What only the records of some runs have."""
        found: dict[str, Any] = {} if raw is None else {"raw": raw}
        if self.first_stage or self.config.lr_schedule != "constant":
            optimizer = self.optimizers.get("main") or next(iter(self.optimizers.values()))
            found |= {"lr": optimizer.param_groups[0]["lr"], "drops": self.schedule.drops}
        if self.first_stage:
            found |= self.first_stage.to_json()
        if self.done == 1 and self.probe is not None:
            found["probe"] = self.probe
        return found

    def _seconds(self, began: float) -> dict[str, float]:
        """The time that a record took, whose evaluation began then."""
        return {
            "seconds_per_step": (began - self._clock) / max(self.done - self._clocked, 1),
            "evaluation_seconds": time.perf_counter() - began,
        }

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self.algorithm.eval()
        try:
            yield
        finally:
            self.algorithm.train()

    def _finish_average(self) -> None:
        """Finish the average, and estimate its batch-norm statistics if it needs them."""
        self.averaging.finish()
        if self.processes.first and self.averaging.outcome():
            log.info("%s: %s", self.config.averaging.name, self.averaging.outcome())
        if self.averaging.needs_statistics:
            with self.averaging.applied():
                self.estimate_statistics()

    def estimate_statistics(self) -> None:
        """Estimate unfrozen batch-norm statistics of the module's weights from training batches."""
        steps = min(STATISTICS_STEPS, self.config.steps)
        watch = self._watch(steps * self.config.batch_size * len(self.sampling.sources))

        def images() -> Iterator[Tensor]:
            for domains in self.store.training(self.sampling, 0, steps):
                watch.saw(sum(len(batch.labels) for batch in domains))
                yield torch.cat([batch.images for batch in domains])

        reestimate(self.algorithm, self._predict, images())
        share_statistics(self.algorithm, self.processes)

    def _predict(self, images: Tensor, source: int | None = None) -> Tensor:
        """Logits of raw images, which may come from one of the sources."""
        images = images.contiguous(memory_format=self.memory_format)
        images = self.algorithm.network.normalize(images)

        def predict() -> Tensor:
            with self._autocast():
                if source is None:
                    return self.algorithm.predict(images)
                return self.algorithm.predict_source(images, source)

        return self.engine.guarded(predict)


@contextmanager
def _determinism_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "does not have a deterministic implementation" not in text:
            raise
        raise RunError(
            f"--deterministic: torch has no deterministic {text.split()[0]!r} on a GPU. Choose "
            "another backbone, or train without --deterministic in another --out."
        ) from error
