"""The files of a run: config.json, data.json, records.jsonl, log.txt, state, checkpoint/."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from steppe.durable import full_disk_explained, replace
from steppe.errors import RunError, UserError
from steppe.sealed import seal, unseal
from steppe.strangers import parse, printable, read
from steppe.validation import first_best, mean

from .config import RunConfig, read_config

VOLATILE = ("seconds_per_step", "evaluation_seconds", "first_stage_seconds", "memory_gb")
"""Record fields that measure the machine and may differ between identical runs."""

FIRST_STAGE = "first-stage"
_LONGEST_STATE = 1000
"""Size limit of the `state` file in bytes; it holds one word."""


class _Facts(BaseModel, strict=True):
    """Keys that every `data.json` has; it may have more."""

    dataset: str
    classes: list[str] = Field(min_length=1)
    channels: int = Field(gt=0, lt=1000)
    sources: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class RunDirectory:
    """Reads and writes the files of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def records_file(self) -> Path:
        """One line of JSON per evaluation."""
        return self.path / "records.jsonl"

    @property
    def data_file(self) -> Path:
        """The run's data: classes, domains, image counts."""
        return self.path / "data.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def first_stage(self) -> Path:
        """The folder of the first stage, if the run has two."""
        return self.path / FIRST_STAGE

    def exists(self) -> bool:
        return self.config_file.exists()

    def create(self, config: RunConfig) -> None:
        """Create the folder with its config, which makes it a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.config_file, config.to_json())

    def config(self) -> RunConfig:
        if not self.exists():
            raise UserError(f"{self.path} is not a run: it has no config.json")
        return read_config(self.config_file)

    def note(self, resolved: Mapping[str, str]) -> None:
        """Store in the config what its `auto` settings resolved to on this machine."""
        config = self.config()
        if config.resolved != resolved:
            _replace(self.config_file, config.model_copy(update={"resolved": resolved}).to_json())

    def data(self) -> dict[str, Any]:
        if not self.data_file.exists():
            raise UserError(f"{self.path} has not started yet: it has no data.json")
        try:
            facts = parse(read(self.data_file))
            _Facts.model_validate(facts if isinstance(facts, dict) else {})
        except ValidationError as error:
            wrong = ", ".join(dict.fromkeys(str(each["loc"][0]) for each in error.errors()))
            raise UserError(f"{self.data_file} is damaged: no valid {wrong}") from None
        except ValueError as error:
            raise UserError(f"{self.data_file} is damaged: not JSON ({error})") from None
        return dict(facts)

    def write_data(self, facts: Mapping[str, Any]) -> None:
        _replace(self.data_file, json.dumps(facts, indent=2) + "\n")

    @property
    def state(self) -> str:
        """`planned`, `running`, `done` or `failed`; an interrupted run is `planned` again."""
        try:
            return read(self.path / "state", _LONGEST_STATE).decode(errors="replace").strip()
        except FileNotFoundError:
            return "planned"

    def set_state(self, state: str) -> None:
        path = self.path / "state"
        try:
            _replace(path, state + "\n")
        except RunError:
            if not path.exists():
                raise
            # A full disk has no room for a new file, but overwriting this one still works.
            with full_disk_explained(path), path.open("r+b", buffering=0) as file:
                file.truncate(file.write(f"{state}\n".encode()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record with its checksum and sync it; a failed write leaves no partial line.

        Each checksum covers only its own line, so lines of earlier versions may come without one.
        """
        rest = seal(json.dumps(record, allow_nan=False)) + b"\n"
        path = self.records_file
        # Unbuffered, so that a failed write raises here, not in a later flush.
        with full_disk_explained(path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while rest:  # a disk that fills up writes a part, and fails on the next call
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, before)
                raise

    def records(self) -> list[dict[str, Any]]:
        """All complete records, without a last line that a crash cut off."""
        try:
            *lines, rest = read(self.records_file).split(b"\n")
        except FileNotFoundError:
            return []
        if rest and self.state == "done":  # no crash explains an incomplete line
            lines.append(rest)
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                if line is rest:
                    raise ValueError("its end is missing")
                records.append(unseal(line))
            except ValueError as error:
                raise RunError(
                    f"{self.records_file}, line {number} is damaged: {error}. Restore the file "
                    f"from a backup, or remove {self.path} to start over."
                ) from None
        return records

    def records_size(self) -> int:
        """Size of the records in bytes, which each checkpoint stores."""
        return self.records_file.stat().st_size if self.records_file.exists() else 0

    def cut_records(self, size: int) -> None:
        """Drop the records after a checkpoint; the resumed run writes them again."""
        missing = size - self.records_size()
        if missing > 0:
            raise RunError(
                f"{self.records_file} has lost {missing} bytes since the last checkpoint: restore "
                f"it, or remove {self.path} to start over"
            )
        if missing:
            os.truncate(self.records_file, size)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Copy everything that steppe logs to ``log.txt``."""
        handler = _LogFile(self.path / "log.txt")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("steppe")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            handler.close()


class _LogFile(logging.Handler):
    """Appends lines to a file, unbuffered; a full disk loses the lines but never stops the run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise UserError(f"{path} is not a regular file: remove it")
        with full_disk_explained(path):
            self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._file.write(f"{printable(self.format(record))}\n".encode())

    def close(self) -> None:
        self._file.close()
        super().close()


def select(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pick a run's record by training-domain validation: the first with the highest mean accuracy.

    If any record is of averaged weights, only those compete (SWAD has one, the last). A run without
    validation images selects its last record.
    """
    if not records:
        raise RunError("the run has no records: its records.jsonl is missing or empty")
    records = [record for record in records if record.get("averaged")] or records
    values = [validation_accuracy(record) for record in records]
    best = None if None in values else first_best(values)
    return records[-1 if best is None else best]


def validation_accuracy(record: Mapping[str, Any]) -> float | None:
    """Mean accuracy on the source domains' validation images; None without any."""
    scores = [d["val"]["accuracy"] for d in record["domains"].values() if "val" in d]
    return mean(scores) if scores else None


def _replace(path: Path, text: str) -> None:
    with full_disk_explained(path):
        replace(path, text.encode())
