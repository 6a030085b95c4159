"""Downloading one file: mirrors in turn, resumed where it stopped, checked before it counts.

Bytes go to ``FILE.part``, and ``FILE.part.json`` says where they came from. Only a file that is
complete and checked gets its name, so an interrupted download (Ctrl-C, a full disk, a power cut)
never looks like a finished one, and the next attempt goes on from its last byte.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path

from steppe import __version__
from steppe.console import Console, Meter, decimal
from steppe.errors import UserError
from steppe.strangers import parse, printable, read

from .spec import Download, Mirror

_CHUNK = 1 << 20
_HEAD = 4096
"""Bytes looked at before a file is believed to be one."""
_MAGIC = {".zip": b"PK", ".gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b"}
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP errors that may be gone a moment later."""


@dataclass(frozen=True)
class Patience:
    """How long to try a mirror."""

    timeout: float = 30.0
    """Seconds without a byte, and seconds until an answer begins."""
    attempts: int = 4
    """Attempts without progress."""
    pause: float = 1.0
    """Seconds between two attempts."""
    rate: float = 2000.0
    """Average bytes per second below which a mirror is given up; bounds the whole time."""
    grace: float = 300.0
    """Seconds before that counts."""


PATIENCE = Patience()


class Unavailable(UserError):
    """No mirror has the file; the message has every URL with the reason."""

    def __init__(self, file: str, failures: list[str]) -> None:
        super().__init__("\n".join([f"no mirror has {file}:", *(f"  {why}" for why in failures)]))
        self.file = file


def download(
    item: Download,
    folder: Path,
    *,
    console: Console | None = None,
    patience: Patience = PATIENCE,
) -> Path:
    """Downloads a file unless it is there, from the first mirror that has it.

    A file with no published checksum is believed the first time: its sha256 is noted beside it, in
    ``FILE.sha256``, and later downloads must match.
    """
    final = folder / item.file
    part = _beside(final, ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Meter(item.file, console=console, unit="bytes", done=_size(part), every=10) as meter:
            if final.exists() and _is_expected(final, item, meter):
                return final
            failures = []
            for mirror in item.mirrors:
                try:
                    _Transfer(mirror, final, item.limit, meter, patience).run()
                    return final
                except _Failed as failed:
                    failures.append(f"{mirror.url}: {failed}")
                    meter.say(failures[-1])
    except OSError as error:  # this disk's: those of the network are `_Failed`
        raise UserError(
            f"cannot write {error.filename or part}: {error.strerror}. Fix that and run the same "
            "command again: it goes on from where it stopped."
        ) from None
    raise Unavailable(item.file, failures)


def _is_expected(final: Path, item: Download, meter: Meter) -> bool:
    """Whether a file that is already there is the one to download; any other is set aside."""
    # Published checksums first: a file that has one needs no note.
    mirrors = sorted(item.mirrors, key=lambda mirror: mirror.checksum is None)
    if any(_complaint(final, final, mirror.checksum, meter) is None for mirror in mirrors):
        meter.say(f"{final} is already there")
        return True
    aside = _beside(final, ".bad")
    os.replace(final, aside)
    meter.say(f"{final} is not the file expected: set aside as {aside.name}")
    return False


@dataclass(frozen=True)
class _Origin:
    """Where the bytes of a part came from, so that more of the same file is added to them only."""

    url: str
    checksum: str | None
    validator: str | None
    total: int | None


class _Failed(Exception):
    """A mirror did not deliver; `passing` if it may do better in a moment."""

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(printable(reason))
        self.passing = passing


class _Transfer:
    """A file from one mirror, which may be slow, hang up, change its mind or send anything."""

    def __init__(
        self, mirror: Mirror, final: Path, limit: int, meter: Meter, patience: Patience
    ) -> None:
        self.mirror, self.final, self.limit = mirror, final, limit
        self.meter, self.patience = meter, patience
        self.part, self.note = _beside(final, ".part"), _beside(final, ".part.json")
        self.received, self.start = 0, time.monotonic()
        self.pieced = False  # whether the part was put together from several answers

    def run(self) -> None:
        """Downloads the file, or raises `_Failed`."""
        url, best, failures = self.mirror.url, 0, 0
        while True:
            try:
                self._request()
            except _Failed as failed:
                size = _size(self.part)
                failures = 0 if size > best else failures + 1
                best = max(best, size)
                if not failed.passing or failures >= self.patience.attempts:
                    raise
                self.meter.say(f"{url}: {failed}; trying again")
                time.sleep(self.patience.pause * 2**failures)
                continue
            complaint = _complaint(self.part, self.final, self.mirror.checksum, self.meter)
            if complaint is None:
                os.replace(self.part, self.final)
                self.note.unlink(missing_ok=True)
                return
            self.part.unlink()
            if not self.pieced:
                raise _Failed(f"{complaint}; deleted")
            self.meter.say(f"{url}: {complaint} after resuming; starting over")
            self.pieced, best = False, 0

    def _request(self) -> None:
        """Asks for what is missing of the part and adds it."""
        size = _size(self.part)
        origin = self._origin() if size else None
        if origin is not None and origin.total == size:
            self.pieced = True  # complete, but not yet checked and named
            return
        headers = {"User-Agent": f"steppe/{__version__}", "Accept-Encoding": "identity"}
        if origin is not None:
            headers["Range"] = f"bytes={size}-"
            if origin.url == self.mirror.url and origin.validator is not None:
                headers["If-Range"] = origin.validator  # all of it if it has changed
        with self._network():
            response = self._answer(urllib.request.Request(self.mirror.url, headers=headers))
        with response:
            self._receive(response, size, origin)

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Turns what goes wrong at the other end into `_Failed`."""
        try:
            yield
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise self._changed() from None
            reason = f"HTTP {error.code} {error.reason}"
            raise _Failed(reason, passing=error.code in _PASSING) from None
        except TimeoutError:
            raise _Failed(f"no answer for {self.patience.timeout:g} s", passing=True) from None
        except urllib.error.URLError as error:
            unknown_host = isinstance(error.reason, socket.gaierror)
            raise _Failed(str(error.reason), passing=not unknown_host) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Failed(str(error) or type(error).__name__, passing=True) from None

    def _answer(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """The beginning of an answer, in time as a whole: Python counts from byte to byte."""
        answer: Future[http.client.HTTPResponse] = Future()
        timeout = self.patience.timeout

        def ask() -> None:
            try:
                answer.set_result(urllib.request.urlopen(request, timeout=timeout))
            except Exception as error:
                answer.set_exception(error)

        # Nobody waits for a thread whose answer comes too late, and what it brings is dropped.
        threading.Thread(target=ask, daemon=True).start()
        return answer.result(2 * timeout)

    def _changed(self) -> _Failed:
        self.part.unlink(missing_ok=True)
        return _Failed("its file has changed", passing=True)

    def _receive(
        self, response: http.client.HTTPResponse, size: int, origin: _Origin | None
    ) -> None:
        """Adds an answer to the part, or begins the part with it."""
        added = response.status == http.client.PARTIAL_CONTENT
        if added and (origin is None or not self._continues(response.headers, size, origin)):
            raise self._changed()
        chunks, head = self._chunks(response), b""
        while len(head) < _HEAD and (chunk := next(chunks, b"")):
            head += chunk
        self.pieced |= added
        if not added or origin is None:  # the whole file, asked for or not
            reason = _not_the_file(self.final.name, head, response.headers)
            if reason is not None:  # before what is there is thrown away
                raise _Failed(reason)
            size, origin = 0, self._begun(response.headers)
            self.part.unlink(missing_ok=True)
            self.note.write_text(json.dumps(asdict(origin)))
        total = origin.total
        most = self.limit if total is None else total
        with self.part.open("ab", buffering=0) as file:  # what has arrived is on the disk
            for chunk in itertools.chain([head], chunks):
                size += len(chunk)
                if size > most:
                    self.part.unlink()
                    raise _Failed(f"it sent more than {decimal(most)}; deleted")
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]
                self.meter.update(size, total=total)
            os.fsync(file.fileno())
        if total is not None and size != total:
            raise _Failed(f"the connection closed after {size} of {total} bytes", passing=True)

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """What arrives; a mirror that is too slow is given up."""
        while True:
            with self._network():
                chunk = response.read1(_CHUNK)
            self.received += len(chunk)
            elapsed = time.monotonic() - self.start
            if elapsed > self.patience.grace + self.received / self.patience.rate:
                raise _Failed(f"it is too slow: {decimal(self.received)} in {elapsed:.0f} s")
            if not chunk:
                return
            yield chunk

    def _begun(self, headers: Message) -> _Origin:
        length = headers.get("Content-Length", "").strip()
        total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        if total is not None and total > self.limit:
            raise _Failed(
                f"it has {decimal(total)}, more than the {decimal(self.limit)} that are expected "
                "at most"
            )
        return _Origin(self.mirror.url, self.mirror.checksum, _validator(headers), total)

    def _origin(self) -> _Origin | None:
        """The part's origin if this mirror may go on with it, or None.

        It may if it has the very same bytes: by their checksum, whichever mirror began, or by the
        validator of the same URL.
        """
        try:
            origin = _Origin(**parse(read(self.note)))
        except (OSError, ValueError, TypeError):  # absent, or cut off by a crash
            return None
        same_bytes = self.mirror.checksum is not None and self.mirror.checksum == origin.checksum
        same_file = self.mirror.url == origin.url and origin.validator is not None
        return origin if same_bytes or same_file else None

    def _continues(self, headers: Message, size: int, origin: _Origin) -> bool:
        """Whether an answer with a part of the file goes on at byte `size` of the file we have."""
        match = re.fullmatch(
            r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18}|\*)", headers.get("Content-Range", "").strip()
        )
        if match is None or int(match[1]) != size:
            return False
        if match[2] != "*" and origin.total not in (None, int(match[2])):
            return False
        return origin.url != self.mirror.url or _validator(headers) in (None, origin.validator)


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(final.name + suffix)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _validator(headers: Message) -> str | None:
    """What a server calls this version of the file, usable in If-Range: not a weak ETag."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


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


def _complaint(path: Path, final: Path, checksum: str | None, meter: Meter) -> str | None:
    """What is wrong with a downloaded file, or None."""
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if checksum is not None:
        return None if found == expected else f"its {algorithm} is {found}, expected {expected}"
    note = _beside(final, ".sha256")
    if not note.exists():
        note.write_text(f"{found}  {final.name}\n")  # as sha256sum writes it
        meter.say(f"{final.name} has no published checksum; its sha256 {found} is noted in {note}")
        return None
    noted = note.read_text().partition(" ")[0]
    if found == noted:
        return None
    return (
        f"its sha256 is {found}, but it was {noted} when first downloaded (delete {note} to "
        "accept the new one)"
    )
