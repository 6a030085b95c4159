"""Merge finished runs in weight space: soups, greedy soups and WiSE-FT.

Only validation images of the source domains decide what is merged. The result is a run.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from steppe.averaging import NoAveraging
from steppe.averaging.merging import Soup, State, between
from steppe.console import Meter
from steppe.durable import sync_folder
from steppe.errors import Interrupted, RunError, UserError
from steppe.validation import first_best

from . import checkpoint, precision, setup
from .config import Named, RunConfig
from .directory import RunDirectory
from .ingredients import NETWORK, Ingredient, Plan, plan_merge
from .interrupts import Interrupts
from .processes import Processes, join
from .progress import Display
from .run import lock
from .served import load_served
from .trainer import Trainer
from .which import Which

ALPHAS = tuple(i / 10 for i in range(11))
"""WiSE-FT's grid."""

log = logging.getLogger("steppe")


@dataclass(frozen=True)
class Merged:
    """A merged run.

    Attributes:
        out: its folder.
        how: `greedy`, `uniform` or `wise`.
        runs: the runs in the average, in the order in which they were added.
        of: the number of runs to choose from.
        alpha: WiSE-FT's share of the fine-tuned weights.
        record: the evaluation of the average.
    """

    out: str
    how: str
    runs: tuple[str, ...]
    of: int
    alpha: float | None
    record: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def merge_runs(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    how: str = "greedy",
    alpha: float | None = None,
    start: str | os.PathLike[str] | None = None,
    which: Which | None = None,
    device: str = "auto",
    root: str | None = None,
    meter: Meter | None = None,
) -> Merged:
    """Merge finished runs into a new one.

    The runs must share everything that makes their weights comparable: data, split, network,
    initial weights and initial classifier. Settings in which they may differ are those of the first
    run, or of the best one with `greedy`.

    Args:
        runs: their folders.
        out: the new run's folder; it appears once everything in it is complete.
        how: ``greedy`` adds runs from the best down, keeping one if the validation accuracy of the
            average does not fall; ``uniform`` takes all; ``wise`` interpolates between a single
            run's initial and final weights (WiSE-FT).
        alpha: WiSE-FT's share of the final weights (default: the best of 0, 0.1, ..., 1 by
            validation accuracy).
        start: the run whose weights WiSE-FT starts from (default: the run's own initial weights).
        which: which weights of each run to merge, as in `load_model`.
        device: where to evaluate.
        root: the data folder (default: the first run's own).
        meter: shows progress.

    Raises:
        UserError: the runs do not belong together; the message says why.

    Examples:
        >>> import tempfile
        >>> from steppe.training import make_config, train
        >>> values = {"dataset": "RotatedDigits", "targets": "75", "steps": 3, "init_seed": 0}
        >>> runs = [tempfile.mkdtemp() for seed in range(2)]
        >>> for seed, run in enumerate(runs):
        ...     records = train(make_config({**values, "seed": seed}), run)
        >>> merged = merge_runs(runs, tempfile.mkdtemp(), how="uniform")
        >>> len(merged.runs), merged.record["averaged"]
        (2, True)
    """
    plan = plan_merge(runs, how, alpha, start, which)
    first = plan.runs[0].config
    config = plan.config if root is None else plan.config.model_copy(update={"root": str(root)})
    with ExitStack() as stack:
        folder = stack.enter_context(_made_at(Path(out)))
        stack.enter_context(folder.logging())
        processes = stack.enter_context(join(device))
        if processes.world > 1:
            raise UserError("merging needs a single process: run it without torchrun")
        number_format = precision.resolve(config.precision, processes.device, first.optimizer)
        stack.enter_context(precision.settings(number_format, config.deterministic))
        interrupts = stack.enter_context(Interrupts())
        shown = _Shown(meter or Meter("", console=None))
        merger = _Merger(plan, config, folder, processes, number_format, shown)
        merger.interrupts = interrupts
        found = merger.merge()
        merger.finish(found)
        record = folder.records()[-1]
    kept = tuple(str(one.path) for one in found.runs)
    return Merged(str(out), how, kept, len(plan.runs), found.alpha, record)


@dataclass(frozen=True)
class _Found:
    """The outcome of merging."""

    runs: tuple[Ingredient, ...]
    alpha: float | None = None


class _Merger(Trainer):
    """A trainer whose weights come from finished runs: it evaluates and saves as any other."""

    def __init__(
        self,
        plan: Plan,
        config: RunConfig,
        folder: RunDirectory,
        processes: Processes,
        number_format: str,
        shown: _Shown,
    ) -> None:
        first = plan.runs[0]
        build = {
            "optimizer": first.config.optimizer,  # the result's may name several
            "averaging": Named(name="none"),
            **checkpoint.REPLACES,
            "engine": "off",  # compiling takes longer than evaluating
            # Nothing is trained, and there are no other weights to evaluate.
            "linear_probe": False,
            "lr_schedule": "constant",
            "evaluate_both": False,
        }
        buildable = config.model_copy(update=build)
        super().__init__(buildable, folder, processes, number_format, shown)
        self.plan, self.result, self.shown = plan, config, shown
        self.averaging = _Served(self.algorithm)
        self._start_clock()
        self.done = config.steps
        self._shapes = {name: v.shape for name, v in self.algorithm.state_dict().items()}
        now, then = setup.data_facts(self.dataset, self.splits), first.data
        if any(now[key] != then.get(key) for key in ("classes", "sources", "fingerprint")):
            raise UserError(
                f"the images of {config.dataset} ({self.dataset.origin}) are not those that "
                f"{first.path} was trained on: restore them"
            )
        folder.write_data(now)

    def merge(self) -> _Found:
        ways = {"greedy": self._greedy, "uniform": self._uniform, "wise": self._wise}
        return ways[self.plan.how]()

    def _uniform(self) -> _Found:
        soup = Soup(self.plan.prefix)
        state: State = {}
        self.shown.expect(len(self.plan.runs))
        for one in self.plan.runs:
            state = {}  # never two in memory
            soup.add(state := self._load(one))
            self.shown.advance()
        self._take(soup.mean(), state)
        return _Found(self.plan.runs)

    def _greedy(self) -> _Found:
        soup, kept, best = Soup(self.plan.prefix), [], -1.0
        serving: State = {}
        self.shown.expect(len(self.plan.runs))
        for one in self.plan.runs:
            state = self._load(one)
            self._take(soup.mean(state), state)
            value = self._validate()
            if value >= best:  # as in DiWA; model-soups asks for more
                soup.add(state)
                kept.append(one)
                best = value
                serving = {k: v.clone() for k, v in self.algorithm.state_dict().items()}
            said = "kept" if kept[-1] is one else "left out"
            log.info("%s: validation %.2f with it, %s", one.path, 100 * value, said)
            self.shown.advance()
        self.algorithm.load_state_dict(serving)
        return _Found(tuple(kept))

    def _wise(self) -> _Found:
        plan, (run,) = self.plan, self.plan.runs
        assert plan.start is not None
        end, start = self._load(run), plan.start.load()
        self._check(start, "the initial weights", plan.prefix)
        if plan.start.probe is not None:
            self.algorithm.load_state_dict(dict(start))
            self._start_from_probe(plan.start.probe)
            start = {k: v.to("cpu", copy=True) for k, v in self.algorithm.state_dict().items()}

        def take(alpha: float) -> None:
            first, mixed = (between(start, end, share, plan.prefix) for share in (0, alpha))
            self._take(mixed, first, end)

        self.shown.expect(len(ALPHAS) if plan.alpha is None else 0)
        if (chosen := plan.alpha) is None:
            values = []
            for alpha in ALPHAS:
                take(alpha)
                values.append(self._validate())
                log.info("alpha %.1f: validation %.2f", alpha, 100 * values[-1])
                self.shown.advance()
            chosen = ALPHAS[first_best(values) or 0]
        take(chosen)
        return _Found(plan.runs, chosen)

    def finish(self, found: _Found) -> None:
        """Evaluate everything, and write the run; its config comes last."""
        options = {} if found.alpha is None else {"alpha": found.alpha}
        start = self.plan.start
        sources = [] if start is None or start.path is None else [start.path]
        sources += [one.path for one in found.runs]
        config = self.result.model_copy(
            update={
                "averaging": Named(name=self.result.averaging.name, **options),
                "merged_from": tuple(str(path.resolve()) for path in sources),
                "resolved": self.resolved,
            }
        )
        self._record()
        self.shown.advance()
        self.dir.set_state("done")
        self.dir.create(config)

    def _diverged(self, what: str) -> NoReturn:
        raise RunError(f"{what}: these weights cannot be merged. Try --how greedy.")

    def _seconds(self, began: float) -> dict[str, float]:
        """The whole merge is evaluation: nothing was trained."""
        return {"evaluation_seconds": time.perf_counter() - self._clock}

    def _load(self, run: Ingredient) -> dict[str, Tensor]:
        if self.interrupts.number is not None:
            raise Interrupted(self.interrupts.number)
        state = load_served(RunDirectory(run.path), self.plan.which).tensors
        if run.config.algorithm.name != self.config.algorithm.name:
            state = {name: v for name, v in state.items() if name.startswith(NETWORK)}
        self._check(state, str(run.path), self.plan.prefix)
        return state

    def _check(self, state: State, whose: str, prefix: str) -> None:
        for name, shape in self._shapes.items():
            if name.startswith(prefix) and (name not in state or state[name].shape != shape):
                there = tuple(state[name].shape) if name in state else "missing"
                raise UserError(
                    f"{whose} cannot be merged with {self.plan.runs[0].path}: {name} is "
                    f"{tuple(shape)} in one and {there} in the other"
                )

    def _take(self, state: State, *whole: State) -> None:
        """Load an average, and estimate its statistics unless it is one of the whole networks."""
        self.algorithm.load_state_dict(dict(state))
        if not any(_equal(state, one) for one in whole):
            self.estimate_statistics()

    def _validate(self) -> float:
        with self._evaluation_mode():
            return self.scoring.validation_accuracy(self.done)


def _equal(state: State, other: State) -> bool:
    return all(name in other and torch.equal(v, other[name]) for name, v in state.items())


class _Served(NoAveraging):
    """The module's own weights, which are the average."""

    @property
    def serving(self) -> bool:
        return True


class _Shown(Display):
    """Progress of a merge."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def expect(self, parts: int) -> None:
        """Set the number of parts to come, besides the final evaluation."""
        self._meter.update(0, total=parts + 1)

    def advance(self) -> None:
        self._meter.advance()

    def evaluating(self, images: int, total: int) -> None:
        self._meter.update(self._meter.done, note=f"evaluating {images:,} of {total:,} images")

    def record(self, record: Mapping[str, Any]) -> None:
        pass


@contextmanager
def _made_at(out: Path) -> Iterator[RunDirectory]:
    """A folder that becomes `out` at the end of the block, and is removed after an error.

    A killed process leaves it under a name that reports skip, for the next one to clear.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = RunDirectory(out.with_name(f".{out.name}.merging"))
    with lock(folder):
        try:
            for left_over in folder.path.iterdir():
                if left_over.is_dir() and not left_over.is_symlink():
                    shutil.rmtree(left_over)
                elif left_over.name != ".lock":
                    left_over.unlink()
            yield folder
            sync_folder(folder.path)
            folder.path.rename(out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
