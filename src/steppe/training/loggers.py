"""Sends a run's records to TensorBoard, Weights & Biases or MLflow as well.

`records.jsonl` is the truth about a run and a tracker shows a copy of it, so a tracker that fails
is reported once and left alone, and training goes on.

A resumed run sends its records again from the first one, because a kill may have lost some that a
tracker had not written yet. No point is shown twice: TensorBoard drops the old ones; W&B and MLflow
keep theirs and take only later steps, which makes no difference where resuming is bit-exact.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from steppe.errors import UserError, unknown

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger("steppe")

_PROJECT = "steppe"
"""The W&B project and the MLflow experiment, unless the trackers' own variables name another."""


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a nested record under names such as trackers group them by.

    Examples:
        >>> flatten({"epoch": 2, "domains": {"photo": {"val": {"accuracy": 0.9}}}, "note": "x"})
        {'epoch': 2.0, 'domains/photo/val/accuracy': 0.9}
    """
    return {
        name: float(value)
        for name, value in _leaves(record)
        if isinstance(value, Real) and not isinstance(value, bool)
    }


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}/")
        else:
            yield above + name, value


class _TensorBoard:
    """Event files in the run's folder `tensorboard`; show them with ``tensorboard --logdir``."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(directory / "tensorboard"))
        # Indented text is code in Markdown, which TensorBoard takes it for.
        self._config = indent(json.dumps(config, indent=2, default=str), "    ")
        self._writer: SummaryWriter | None = None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened with the first record, because readers drop what earlier files have from
            # purge_step on, and from there on a resumed run sends its records again.
            self._writer = self._open(purge_step=step)
            self._writer.add_text("config", self._config, step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # events wait in a queue, which a kill would lose

    def close(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()


class _WandB:
    """A W&B run; `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE` and the rest are W&B's own."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        import wandb

        # The server knows a resumed run by its id and goes on where its history ends; W&B drops
        # what is logged for an earlier step. Offline every start of a run has a folder of its own,
        # and the newest has all records: that is the one for `wandb sync`.
        file = directory / "wandb.id"
        run_id = _remembered(file, resume)
        if run_id is None:
            run_id = uuid.uuid4().hex
            file.write_text(run_id)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run_id,
            name=directory.resolve().name,
            dir=str(directory),
            config=dict(config),
            resume="allow",
            reinit="create_new",  # leaves alone a run that the calling program may have of its own
            settings=wandb.Settings(
                console="off",  # capturing the terminal breaks progress bars; log.txt has the text
                finish_timeout=300,  # otherwise a dead network keeps the process for ever
            ),
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # Without commit a row is held back until the next one comes.
        self._run.log(dict(values), step=step, commit=True)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


class _MLflow:
    """An MLflow run where `MLFLOW_TRACKING_URI` points to.

    The extra brings the client for a server; MLflow's local SQLite file needs ``pip install
    mlflow``.
    """

    _STATUS = {"done": "FINISHED", "failed": "FAILED"}  # noqa: RUF012  (read only)
    _REFUSED = re.compile(r"[^\w.\- :/]")  # in names; a folder of the user's may have any

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient()
        self._last: dict[str, int] = {}
        file = directory / "mlflow.id"
        run_id = _remembered(file, resume)
        if run_id is None:
            name = directory.resolve().name
            run_id = self._client.create_run(_experiment(self._client), run_name=name).info.run_id
            file.write_text(run_id)
            params = [Param(self._name(key), str(value)) for key, value in _leaves(config)]
            self._client.log_batch(run_id, params=params)
        else:
            self._client.update_run(run_id, status="RUNNING")
            # MLflow only appends, so that what it has must not be sent again. Asked for each name,
            # because a kill may have come between two names of one record.
            for name in self._client.get_run(run_id).data.metrics:
                points = self._client.get_metric_history(run_id, name)
                self._last[name] = max(point.step for point in points)
        self._id = run_id

    def record(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = ((self._name(name), value) for name, value in values.items())
        new = [
            self._metric(name, value, now, step)
            for name, value in named
            if step > self._last.get(name, -1)
        ]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, self._STATUS.get(state, "KILLED"))

    def _name(self, name: str) -> str:
        return self._REFUSED.sub("_", name)


def _experiment(client: MlflowClient) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        found = client.get_experiment_by_name(name)  # of an earlier run, or a quicker worker's
        if found is None:
            raise
        return str(found.experiment_id)


def _remembered(file: Path, resume: bool) -> str | None:
    """The tracker's id of the run, where it is resumed and was tracked before."""
    return (file.read_text().strip() or None) if resume and file.exists() else None


Tracker = _TensorBoard | _WandB | _MLflow
"""Where the records of one run also go; it is closed with the run's state, or as ``running``."""

# The names are also those of the packages.
_BACKENDS: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}


class Trackers:
    """The trackers of a run; the first failure of one is its last act."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.record(step, values))

    def close(self, state: str) -> None:
        self._each(lambda tracker: tracker.close(state))
        self._open.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            # Not tried again after a failure: a dead server may take minutes to be given up on.
            del self._open[name]
            with _contained(name, fatal=False):
                action(tracker)
                self._open[name] = tracker


def open_loggers(
    names: Sequence[str], directory: Path, config: Mapping[str, Any], resume: bool = False
) -> Trackers:
    """Start the trackers of a run; only their packages are imported.

    A tracker that cannot be started is an error for a new run, while its user is there to fix it.
    A resumed run goes on without it: a cluster may have restarted it at night. It sends again the
    records it has so far.
    """
    check_loggers(names)
    trackers = Trackers()
    try:
        for name in dict.fromkeys(names):
            with _contained(name, fatal=not resume):
                trackers._open[name] = _BACKENDS[name](directory, config, resume)
    except BaseException:
        trackers.close("failed")
        raise
    return trackers


def check_loggers(names: Sequence[str]) -> None:
    """Refuses a name that is not known, and one whose package is not installed."""
    for name in names:
        if name not in _BACKENDS:
            raise UserError(unknown("logger", name, _BACKENDS))
        # A folder of that name, such as the `wandb` that W&B makes, is a package without an origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise ModuleNotFoundError(
                f"the logger {name!r} needs the package {name!r}: pip install 'steppe[loggers]'",
                name=name,
            )


@contextmanager
def _contained(name: str, fatal: bool) -> Iterator[None]:
    """Keeps what a tracker does from reaching the training."""
    # MLflow waits a random time before it asks a server again, from the generator of everybody.
    state = random.getstate()
    try:
        yield
    # Anything may come out of three packages, their networks and their disks, and none of it is
    # worth a run.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if fatal:
            raise UserError(f"the logger {name!r} could not be started: {reason}") from error
        left_out = "failed and is left out from here on (records.jsonl has every record)"
        _log.warning("the logger %r %s: %s", name, left_out, reason)
    finally:
        random.setstate(state)
