"""A cache of what a sweep's runs contain, so that a report reads only the runs that changed.

The file has one line of JSON for each run, with a checksum. It is only a cache: a run whose line is
missing, damaged or out of date is read from its own files. A line is out of date if the size, the
times or the inode of one of those files have changed, as after any edit, copy or restore.
"""

from __future__ import annotations

import base64
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from steppe import __version__
from steppe.durable import replace
from steppe.sealed import KEY, broken, seal
from steppe.strangers import read

NAME = ".report-index.jsonl"
FILES = ("config.json", "records.jsonl", "state")
"""The files of a run that reports read."""
LEAST, SHARE = 100, 32
"""The file is written if at least `LEAST` lines and one in `SHARE` would be new."""
_TICK = 2 * 10**9
"""Nanoseconds: the coarsest time stamps of a file system. A file that was modified twice within one
tick may look unchanged, so it must be older to be indexed."""


class Contents(NamedTuple):
    """A run's files, read and checked."""

    config: bytes
    state: str
    records: Sequence[Sequence[Any]]
    """The fields of its records, each with its accuracies as a list of ((domain, part), value)."""
    images: Mapping[tuple[str, str], int]
    """Number of images by domain and part."""


class Index:
    """The index of one sweep. No method raises an error for an unreadable or read-only folder.

    Args:
        sweep: the sweep's folder.
        reader: source file of the code that reads runs, whose lines another version cannot trust.
    """

    def __init__(self, sweep: Path, reader: str) -> None:
        self._sweep, self._file, self._began = sweep, sweep / NAME, time.monotonic_ns()
        self._above = "" if sweep == Path() else os.path.join(sweep, "")
        self._head = b""
        self._lines: dict[bytes, bytes] = {}
        self._kept: list[bytes] = []
        self._new: list[tuple[int, bytes]] = []
        self._signs: dict[str, list[list[int]]] = {}
        with suppress(OSError):
            code = zlib.crc32(Path(reader).read_bytes())
            self._head = seal(orjson.dumps({"steppe": __version__, "code": code}).decode())
            head, *lines = read(self._file).split(b"\n")
            if head == self._head:
                self._lines = {line[: line.find(b',"files":')]: line for line in lines}

    def find(self, folder: str) -> Contents | None:
        """The contents of a run, if its files are those that the index has seen."""
        try:
            # Before the files are read: a change in between makes the line out of date.
            self._signs[folder] = sign = _sign(folder)
            line = self._lines[self._key(folder)]
            if broken(line):
                return None
            found = orjson.loads(line)
            if found["files"] != sign or KEY not in found:
                return None
            keys = [[(domain, part) for domain, part in names] for names in found["keys"]]
            packed = base64.b64decode(found["accuracy"])
            values = iter(struct.unpack(f"<{len(packed) // 8}d", packed))
            # Each record takes as many values as it has keys.
            records = [
                (step, dict(zip(keys[which], values, strict=False)), *others)
                for step, which, *others in found["records"]
            ]
            images = {(domain, part): n for domain, part, n in found["images"]}
            contents = Contents(found["config"].encode(), found["state"], records, images)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
            return None
        self._kept.append(line)
        return contents

    def add(self, folder: str, contents: Contents) -> None:
        """Index the contents of a run that `find` did not know."""
        if (sign := self._signs.get(folder)) is None:
            return
        keys: list[list[Any]] = []
        values: list[float] = []
        records = []
        for step, accuracy, *others in contents.records:
            names = list(accuracy)
            if not keys or keys[-1] != names:  # most records of a run have the same
                keys.append(names)
            values += accuracy.values()
            records.append((step, len(keys) - 1, *others))
        facts = {
            "files": sign,
            "config": contents.config,
            "state": contents.state,
            "keys": keys,
            # Read three times as fast as numbers in JSON, and most of what there is to read.
            "accuracy": base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode(),
            "records": records,
            "images": [(*key, n) for key, n in contents.images.items()],
        }
        with suppress(TypeError, ValueError):  # not JSON: numbers above 64 bits, other encodings
            facts["config"] = contents.config.decode()
            text = self._key(folder).decode() + "," + orjson.dumps(facts).decode()[1:]
            self._new.append((max(map(max, (times[1:3] for times in sign))), seal(text)))

    def save(self) -> None:
        """Write the file, if enough has changed."""
        if len(self._new) < max(LEAST, len(self._kept) // SHARE):
            return
        with suppress(OSError):
            with tempfile.TemporaryFile(dir=self._sweep) as probe:
                now = os.fstat(probe.fileno()).st_mtime_ns  # by the file system's clock
            began = now - (time.monotonic_ns() - self._began)
            new = [line for when, line in self._new if when < began - _TICK]
            if self._head and new and not self._file.is_symlink():  # a link could lead anywhere
                replace(self._file, b"\n".join([self._head, *self._kept, *new]))

    def _key(self, folder: str) -> bytes:
        return b'{"run":' + orjson.dumps(folder.removeprefix(self._above))


def _sign(folder: str) -> list[list[int]]:
    """What changes with a run's files."""
    stats = (os.stat(os.path.join(folder, name)) for name in FILES)
    return [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in stats]
