"""A run's folder: config.json, records.jsonl, log.txt, state."""

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

VOLATILE = ("seconds_per_step", "evaluation_seconds", "memory_gb")
"""Fields of a record that measure the machine: two equal runs may differ in them."""

_LONGEST_STATE = 1000
"""Bytes; it is one word."""


class _Facts(BaseModel, strict=True):
    """What every `data.json` says, among other things."""

    dataset: str
    classes: list[str] = Field(min_length=1)
    channels: int = Field(gt=0, lt=1000)
    sources: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def records_file(self) -> Path:
        """One line of JSON for every evaluation."""
        return self.path / "records.jsonl"

    @property
    def data_file(self) -> Path:
        """What the run learns from: classes, domains, numbers of images."""
        return self.path / "data.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def exists(self) -> bool:
        return self.config_file.exists()

    def create(self, config: RunConfig) -> None:
        """Starts a run: its config is the first thing written."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.config_file, config.to_json())

    def config(self) -> RunConfig:
        if not self.exists():
            raise UserError(f"{self.path} is not a run: it has no config.json")
        return read_config(self.config_file)

    def note(self, resolved: Mapping[str, str]) -> None:
        """Notes in the config what its settings stood for on this machine."""
        config = self.config()
        if config.resolved != resolved:
            _replace(self.config_file, config.model_copy(update={"resolved": resolved}).to_json())

    def data(self) -> dict[str, Any]:
        if not self.data_file.exists():
            raise UserError(f"{self.path} was not begun yet: it has no data.json")
        try:
            facts = parse(read(self.data_file))
            _Facts.model_validate(facts if isinstance(facts, dict) else {})
        except ValidationError as error:
            wrong = ", no ".join(dict.fromkeys(str(each["loc"][0]) for each in error.errors()))
            raise UserError(f"{self.data_file} is damaged: it has no {wrong}") from None
        except ValueError as error:
            raise UserError(f"{self.data_file} is damaged, not JSON: {error}") from None
        return dict(facts)

    def write_data(self, facts: Mapping[str, Any]) -> None:
        _replace(self.data_file, json.dumps(facts, indent=2) + "\n")

    @property
    def state(self) -> str:
        """`planned`, `running`, `done` or `failed`; a run that was interrupted is planned again."""
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
            # On a full disk there is no room for another file, but there is for this one.
            with full_disk_explained(path), path.open("r+b", buffering=0) as file:
                file.truncate(file.write(f"{state}\n".encode()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record with its checksum, flushed to the disk; a failed write leaves no half line.

        A checksum covers its own line alone, so that lines without one, of earlier versions, may
        come before it.
        """
        rest = seal(json.dumps(record, allow_nan=False)) + b"\n"
        path = self.records_file
        # Unbuffered, so that a failed write fails here and not in a later flush.
        with full_disk_explained(path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while rest:  # a disk that fills up takes what it can, and fails the next time
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, before)
                raise

    def records(self) -> list[dict[str, Any]]:
        """All complete records; a last line cut off by a crash is left out."""
        try:
            *lines, rest = read(self.records_file).split(b"\n")
        except FileNotFoundError:
            return []
        if rest and self.state == "done":  # nothing was cut off
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
                    f"from a copy, or remove {self.path} to start over."
                ) from None
        return records

    def records_size(self) -> int:
        """The length of the records in bytes, which a checkpoint remembers."""
        return self.records_file.stat().st_size if self.records_file.exists() else 0

    def cut_records(self, size: int) -> None:
        """Drops what was recorded after a checkpoint: the resumed run records it again."""
        missing = size - self.records_size()
        if missing > 0:
            raise RunError(
                f"{self.records_file} lacks {missing} bytes that were there when the last "
                f"checkpoint was written: put it back, or remove {self.path} to start anew"
            )
        if missing:
            os.truncate(self.records_file, size)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Has everything that steppe logs also go to ``log.txt``."""
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
    """Lines at the end of a file; nothing depends on them, and a full disk loses only them.

    Unbuffered, so that nothing is left to be written, and to fail, when it is closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            raise UserError(f"{path} is not a plain file: remove it")
        with full_disk_explained(path):
            self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._file.write(f"{printable(self.format(record))}\n".encode())

    def close(self) -> None:
        self._file.close()
        super().close()


def select(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record that train-domain validation picks: the first with the highest mean accuracy.

    The last one, where a run has no validation images. Where weights were averaged, records of the
    averaged ones come before all others: SWAD has one, the last.
    """
    if not records:
        raise RunError("the run has no records: was its records.jsonl lost?")
    records = [record for record in records if record.get("averaged")] or records
    values = [validation_accuracy(record) for record in records]
    best = None if None in values else first_best(values)
    return records[-1 if best is None else best]


def validation_accuracy(record: Mapping[str, Any]) -> float | None:
    """The mean accuracy on the source domains' validation images, if there are any."""
    scores = [d["val"]["accuracy"] for d in record["domains"].values() if "val" in d]
    return mean(scores) if scores else None


def _replace(path: Path, text: str) -> None:
    with full_disk_explained(path):
        replace(path, text.encode())
