"""Send a run's records to TensorBoard, Weights & Biases or MLflow.

Trackers show a copy of `records.jsonl`, so a failing tracker is reported once and dropped, and
training continues.

A resumed run sends all its records again, because a kill may have lost some that a tracker had not
written yet. No point appears twice: TensorBoard drops the old ones; W&B and MLflow ignore steps
that they already have.
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
"""Default W&B project and MLflow experiment; the trackers' own variables override it."""


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a nested record's numbers, with slashes in the names so that trackers group them.

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
    """Writes event files to `tensorboard` in the run's folder."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(directory / "tensorboard"))
        # TensorBoard renders Markdown, where indented text is code.
        self._config = indent(json.dumps(config, indent=2, default=str), "    ")
        self._writer: SummaryWriter | None = None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened at the first record: readers drop earlier points from purge_step on, and a
            # resumed run sends them again.
            self._writer = self._open(purge_step=step)
            self._writer.add_text("config", self._config, step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill would lose queued events

    def close(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()


class _WandB:
    """Logs to a W&B run; W&B's own variables such as `WANDB_PROJECT` apply."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        import wandb

        # W&B continues a run with a known id and drops rows for earlier steps. Offline, every start
        # makes its own folder; the newest has all records and is the one for `wandb sync`.
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
            reinit="create_new",  # keeps a W&B run of the calling program intact
            settings=wandb.Settings(
                console="off",  # capturing the terminal breaks progress bars
                finish_timeout=300,  # a dead network would block the process forever
            ),
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # Without commit, W&B holds a row back until the next one.
        self._run.log(dict(values), step=step, commit=True)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


class _MLflow:
    """Logs to an MLflow run at `MLFLOW_TRACKING_URI`.

    The extra installs the client for a server; a local SQLite file needs ``pip install mlflow``.
    """

    _STATUS = {"done": "FINISHED", "failed": "FAILED"}  # noqa: RUF012  (read only)
    _REFUSED = re.compile(r"[^\w.\- :/]")  # characters that MLflow rejects in names

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
            # MLflow only appends, so points must not be sent twice. Checked per name, because a
            # kill may have separated two names of one record.
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
        found = client.get_experiment_by_name(name)  # from an earlier run or another worker
        if found is None:
            raise
        return str(found.experiment_id)


def _remembered(file: Path, resume: bool) -> str | None:
    """The tracker's id of a resumed run, if it was tracked before."""
    return (file.read_text().strip() or None) if resume and file.exists() else None


Tracker = _TensorBoard | _WandB | _MLflow

# The names are also the package names.
_BACKENDS: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}


class Trackers:
    """The open trackers of a run; one that fails is dropped."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.record(step, values))

    def close(self, state: str) -> None:
        self._each(lambda tracker: tracker.close(state))
        self._open.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            # Dropped after one failure, because each timeout of a dead server may take minutes.
            del self._open[name]
            with _contained(name, fatal=False):
                action(tracker)
                self._open[name] = tracker


def open_loggers(
    names: Sequence[str], directory: Path, config: Mapping[str, Any], resume: bool = False
) -> Trackers:
    """Start the trackers of a run, importing only their packages.

    A tracker that does not start is an error for a new run. A resumed run continues without it,
    because a cluster may have restarted it unattended.
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
    """Reject unknown loggers and those whose package is not installed."""
    for name in names:
        if name not in _BACKENDS:
            raise UserError(unknown("logger", name, _BACKENDS))
        # A folder of that name, such as W&B's `wandb`, is a package without an origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise ModuleNotFoundError(
                f"the logger {name!r} needs the package {name!r}: pip install 'steppe[loggers]'",
                name=name,
            )


@contextmanager
def _contained(name: str, fatal: bool) -> Iterator[None]:
    """Keep a tracker's errors and random draws out of the training."""
    # MLflow draws its retry delays from the global generator.
    state = random.getstate()
    try:
        yield
    except Exception as error:  # no failure of a tracker is worth losing a run
        reason = f"{type(error).__name__}: {error}"
        if fatal:
            raise UserError(f"the logger {name!r} could not be started: {reason}") from error
        dropped = "failed and is now off (records.jsonl has every record)"
        _log.warning("the logger %r %s: %s", name, dropped, reason)
    finally:
        random.setstate(state)
