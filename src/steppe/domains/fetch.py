"""Downloading one file: mirrors in turn, resumed where it stopped, checked before it counts.

Bytes go to ``FILE.part``, and ``FILE.part.json`` says where they came from. Only a file that is
complete and checked gets its name, so an interrupted download (Ctrl-C, a full disk, a power cut)
never looks like a finished one, and the next attempt goes on from its last byte.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from steppe import __version__
from steppe.errors import UserError
from steppe.strangers import parse, printable, read

Report = Callable[[str], object]
"""Told what happens, a line at a time."""
Tick = Callable[[str, int, int | None], object]
"""Told how far a file is: its name, the bytes here, and all its bytes where that is known."""

_CHUNK = 1 << 20
_HEAD = 4096
"""Bytes looked at before a file is believed to be one."""
_MAGIC = {".zip": b"PK", ".gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b"}
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP errors that may be gone a moment later."""


LIMIT = 200 * 10**9
"""Bytes that no file of a dataset has."""


@dataclass(frozen=True)
class Mirror:
    """One place that has a file.

    Attributes:
        url: where it is.
        checksum: of what this place has, as ``md5:...`` or ``sha256:...``; None if none is known.
    """

    url: str
    checksum: str | None = None


@dataclass(frozen=True)
class Download:
    """A file and the places that have it.

    Attributes:
        file: the name it is given here.
        mirrors: tried in this order.
        into: the folder below the dataset's to unpack it in.
        limit: bytes that it certainly does not have; a server that has more is not believed.
    """

    file: str
    mirrors: tuple[Mirror, ...]
    into: str = ""
    limit: int = LIMIT


@dataclass(frozen=True)
class Patience:
    """How long to try a mirror.

    Attributes:
        timeout: seconds without a byte, and seconds until an answer begins.
        attempts: attempts without progress.
        pause: seconds between two attempts.
        rate: bytes a second, on average, that a mirror must deliver to be tried any longer; with a
            file's `limit` this bounds the whole time.
        grace: seconds before that counts.
    """

    timeout: float = 30.0
    attempts: int = 4
    pause: float = 1.0
    rate: float = 2000.0
    grace: float = 300.0


PATIENCE = Patience()


class Unavailable(UserError):
    """No mirror has the file; the message has every URL with the reason.

    Attributes:
        file: the file's name.
        failures: each URL and why it failed.
    """

    def __init__(self, file: str, failures: list[tuple[str, str]]) -> None:
        self.file = file
        self.failures = failures
        lines = [f"  {url}: {reason}" for url, reason in failures]
        super().__init__("\n".join([f"no mirror has {file}:", *lines]))


def download(
    item: Download,
    folder: Path,
    *,
    report: Report,
    tick: Tick = lambda file, done, total: None,
    patience: Patience = PATIENCE,
) -> Path:
    """Downloads a file unless it is there, from the first mirror that has it.

    A file with no published checksum is believed the first time: its sha256 is noted beside it, in
    ``FILE.sha256``, and later downloads must match.

    Args:
        item: the file.
        folder: where it goes.
        report: told what happens.
        tick: told how far it is.
        patience: how long to try each mirror.

    Returns:
        The path of the checked file.
    """
    final = folder / item.file
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if final.exists():
        # Published checksums first: a file that has one needs no note.
        mirrors = sorted(item.mirrors, key=lambda mirror: mirror.checksum is None)
        if any(_complaint(final, final, mirror.checksum, report) is None for mirror in mirrors):
            report(f"{final} is already there")
            return final
        aside = _beside(final, ".bad")
        os.replace(final, aside)
        report(f"{final} is not the file expected: set aside as {aside.name}")
    failures = []
    for mirror in item.mirrors:
        reason = _download_from(mirror, final, item.limit, report, tick, patience)
        if reason is None:
            return final
        report(f"{mirror.url}: {reason}")
        failures.append((mirror.url, reason))
    raise Unavailable(item.file, failures)


@dataclass(frozen=True)
class _Origin:
    """Where the bytes of a part came from, so that more of the same file is added to them only."""

    url: str
    checksum: str | None
    validator: str | None
    total: int | None


class _Failed(Exception):
    """A mirror did not deliver; `passing` if it may do better in a moment."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(printable(reason))
        self.passing = passing


class _Watch:
    """Ends a download that is too slow, or longer than a file can be."""

    def __init__(self, patience: Patience, limit: int) -> None:
        self.patience, self.limit = patience, limit
        self._received, self._start = 0, time.monotonic()

    def announced(self, total: int | None) -> None:
        if total is not None and total > self.limit:
            raise _Failed(
                f"it has {decimal(total)}, more than the {decimal(self.limit)} that are expected "
                "at most",
                passing=False,
            )

    def received(self, count: int) -> None:
        self._received += count
        elapsed = time.monotonic() - self._start
        if elapsed > self.patience.grace + self._received / self.patience.rate:
            raise _Failed(
                f"it is too slow: {decimal(self._received)} in {elapsed:.0f} s", passing=False
            )


def _download_from(
    mirror: Mirror, final: Path, limit: int, report: Report, tick: Tick, patience: Patience
) -> str | None:
    """Downloads from one mirror; returns why it failed, or None."""
    part = _beside(final, ".part")
    watch = _Watch(patience, limit)
    best = failures = 0
    pieced = False  # whether the part was put together from several answers
    while True:
        try:
            watch.received(0)
            pieced |= _request(mirror, final, tick, watch)
        except _Failed as failed:
            size = part.stat().st_size if part.exists() else 0
            failures = 0 if size > best else failures + 1
            best = max(best, size)
            if not failed.passing or failures >= patience.attempts:
                return str(failed)
            report(f"{mirror.url}: {failed}; trying again")
            time.sleep(patience.pause * 2**failures)
            continue
        complaint = _complaint(part, final, mirror.checksum, report)
        if complaint is None:
            os.replace(part, final)
            _beside(final, ".part.json").unlink(missing_ok=True)
            return None
        part.unlink()
        if not pieced:
            return f"{complaint}; deleted"
        report(f"{mirror.url}: {complaint} after resuming; starting over")
        pieced, best = False, 0


def _request(mirror: Mirror, final: Path, tick: Tick, watch: _Watch) -> bool:
    """Asks a mirror for what is missing of the part, and adds it.

    Returns:
        Whether there was something to add to.
    """
    part = _beside(final, ".part")
    size = part.stat().st_size if part.exists() else 0
    origin = _origin(final, mirror) if size else None
    if origin is not None and origin.total == size:
        return True  # complete, but not yet checked and named
    headers = {"User-Agent": f"steppe/{__version__}", "Accept-Encoding": "identity"}
    if origin is not None:
        headers["Range"] = f"bytes={size}-"
        if origin.url == mirror.url and origin.validator is not None:
            headers["If-Range"] = origin.validator  # all of it if it has changed
    request = urllib.request.Request(mirror.url, headers=headers)
    timeout = watch.patience.timeout
    try:
        with _answer(request, timeout) as response:
            added = bool(response.status == http.client.PARTIAL_CONTENT)
            if added and (origin is None or not _continues(response.headers, size, origin, mirror)):
                part.unlink(missing_ok=True)
                raise _Failed("its file has changed", passing=True)
            head = _head(response, watch)
            if not added or origin is None:  # the whole file, asked for or not
                reason = _not_the_file(final.name, head, response.headers)
                if reason is not None:  # before what is there is thrown away
                    raise _Failed(reason, passing=False)
                size, origin = 0, _started(mirror, response.headers)
                watch.announced(origin.total)
                with _writing(part):
                    part.unlink(missing_ok=True)
                    _beside(final, ".part.json").write_text(json.dumps(asdict(origin)))
            _store(response, head, part, size, origin.total, tick, watch)
            return added
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and origin is not None:
            part.unlink()
            raise _Failed("its file has changed", passing=True) from None
        reason = f"HTTP {error.code} {error.reason}"
        raise _Failed(reason, passing=error.code in _PASSING) from None
    except TimeoutError:
        raise _Failed(f"no answer for {timeout:g} s", passing=True) from None
    except urllib.error.URLError as error:
        unknown_host = isinstance(error.reason, socket.gaierror)
        raise _Failed(str(error.reason), passing=not unknown_host) from None
    except UserError:  # this disk's
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # the network's
        raise _Failed(str(error) or type(error).__name__, passing=True) from None


def _answer(request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """The beginning of an answer, all of it within the time: Python counts from byte to byte."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=timeout))
        except Exception as error:
            answers.put(error)

    # Nobody waits for a thread whose answer comes too late, and what it brings is dropped.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=2 * timeout)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return cast(http.client.HTTPResponse, answer)


def _head(response: http.client.HTTPResponse, watch: _Watch) -> bytes:
    head = b""
    while len(head) < _HEAD and (chunk := response.read1(_HEAD - len(head))):
        head += chunk
        watch.received(0)
    return head


def _store(
    response: http.client.HTTPResponse,
    chunk: bytes,
    part: Path,
    size: int,
    total: int | None,
    tick: Tick,
    watch: _Watch,
) -> None:
    """Appends an answer to the part, unbuffered: what has arrived is on the disk."""
    most = watch.limit if total is None else total
    with _writing(part):
        file = part.open("ab", buffering=0)
    with file:
        while chunk:
            if size + len(chunk) > most:
                part.unlink()
                raise _Failed(f"it sent more than {decimal(most)}; deleted", passing=False)
            left = memoryview(chunk)
            with _writing(part):
                while left:
                    left = left[file.write(left) :]
            size += len(chunk)
            watch.received(len(chunk))
            tick(part.name.removesuffix(".part"), size, total)
            chunk = response.read1(_CHUNK)
        with _writing(part):
            os.fsync(file.fileno())
    if total is not None and size != total:
        raise _Failed(f"the connection closed after {size} of {total} bytes", passing=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into an error for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}. Fix that and run the same command again: it "
            "goes on from where it stopped."
        ) from None


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(final.name + suffix)


def _started(mirror: Mirror, headers: Message) -> _Origin:
    length = headers.get("Content-Length", "").strip()
    total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
    return _Origin(mirror.url, mirror.checksum, _validator(headers), total)


def _origin(final: Path, mirror: Mirror) -> _Origin | None:
    """The part's origin if this mirror may go on with it, or None.

    It may if it has the very same bytes: by their checksum, whichever mirror began, or by the
    validator of the same URL.
    """
    try:
        origin = _Origin(**parse(read(_beside(final, ".part.json"))))
    except (OSError, ValueError, TypeError):  # absent, or cut off by a crash
        return None
    same_bytes = mirror.checksum is not None and mirror.checksum == origin.checksum
    same_file = mirror.url == origin.url and origin.validator is not None
    return origin if same_bytes or same_file else None


def _validator(headers: Message) -> str | None:
    """What a server calls this version of the file, usable in If-Range: not a weak ETag."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _continues(headers: Message, size: int, origin: _Origin, mirror: Mirror) -> bool:
    """Whether an answer with a part of the file goes on at byte `size` of the file we have."""
    match = re.fullmatch(
        r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18}|\*)", headers.get("Content-Range", "").strip()
    )
    if match is None or int(match[1]) != size:
        return False
    if match[2] != "*" and origin.total not in (None, int(match[2])):
        return False
    return origin.url != mirror.url or _validator(headers) in (None, origin.validator)


def _not_the_file(name: str, head: bytes, headers: Message) -> str | None:
    """Why an answer is not the file asked for, such as a page that says so; None if it may be."""
    magic = _MAGIC.get(Path(name).suffix)
    if magic is not None and head.startswith(magic):
        return None
    start = head.lstrip().lower()
    if headers.get_content_type() == "text/html" or start.startswith((b"<!doctype html", b"<html")):
        title = re.search(rb"<title[^>]*>(.*?)</title>", head, re.IGNORECASE | re.DOTALL)
        said = f" ({title[1].decode(errors='replace').strip()!r})" if title else ""
        return f"sent a web page{said} instead of the file"
    return None if magic is None else f"what it sent is not a {Path(name).suffix} file"


def _complaint(path: Path, final: Path, checksum: str | None, report: Report) -> str | None:
    """What is wrong with a downloaded file, or None."""
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if checksum is not None:
        return None if found == expected else f"its {algorithm} is {found}, expected {expected}"
    note = _beside(final, ".sha256")
    if not note.exists():
        with _writing(note):
            note.write_text(f"{found}  {final.name}\n")  # as sha256sum writes it
        report(f"{final.name} has no published checksum; its sha256 {found} is noted in {note}")
        return None
    noted = note.read_text().partition(" ")[0]
    if found == noted:
        return None
    return (
        f"its sha256 is {found}, but it was {noted} when first downloaded (delete {note} to "
        "accept the new one)"
    )


@contextmanager
def meter(report: Report, *, console: Console | None = None, every: float = 10.0) -> Iterator[Tick]:
    """Shows progress with rate and time left: a bar on a terminal, plain lines elsewhere.

    Args:
        report: told the plain lines.
        console: where the bar is drawn; the standard error stream unless given.
        every: seconds between two plain lines about a file.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _plain(report, every)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def tick(file: str, done: int, total: int | None) -> None:
            if file not in tasks:  # what an earlier attempt left does not count as speed
                tasks[file] = progress.add_task(file, completed=done, total=total)
            progress.update(tasks[file], completed=done, total=total)

        yield tick


def _plain(report: Report, every: float) -> Tick:
    begun: dict[str, tuple[float, int]] = {}
    said: dict[str, float] = {}

    def tick(file: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        start, first = begun.setdefault(file, (now, done))
        if done != total and now - said.setdefault(file, now) < every:
            return
        said[file] = now
        line = f"{file}: {decimal(done)}" + (f" of {decimal(total)}" if total is not None else "")
        if done > first and now > start:
            rate = (done - first) / (now - start)
            line += f", {decimal(int(rate))}/s"
            if total is not None and done != total:
                line += f", {(total - done) / rate:.0f} s left"
        report(line)

    return tick
