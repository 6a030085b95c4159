"""Download one file: try mirrors in order, resume, and verify before use.

Bytes go to ``FILE.part``, and ``FILE.part.json`` records where they came from. A file gets its
final name only when it is complete and verified, so an interrupted download (Ctrl-C, a full disk, a
power cut) never looks finished, and the next attempt continues from its last byte.
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
"""Bytes to inspect before an answer counts as the file and not as a web page."""
_MAGIC = {".zip": b"PK", ".gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b"}
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Transient HTTP errors."""


@dataclass(frozen=True)
class Patience:
    """How long to try a mirror."""

    timeout: float = 30.0
    """Maximum seconds between bytes, and until an answer begins."""
    attempts: int = 4
    """Maximum attempts without progress."""
    pause: float = 1.0
    """Seconds between attempts; doubles with each failure."""
    rate: float = 2000.0
    """Minimum average rate in bytes per second, which bounds the total time."""
    grace: float = 300.0
    """Seconds before `rate` applies."""


PATIENCE = Patience()


class Unavailable(UserError):
    """No mirror delivered the file; the message lists every URL with the reason."""

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
    """Download a file from the first mirror that has it, unless it already exists.

    A file without a published checksum is trusted on first download: its sha256 is saved in
    ``FILE.sha256``, and later downloads must match it.
    """
    final = folder / item.file
    part = Path(f"{final}.part")
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
    except OSError as error:  # from the disk: network errors are `_Failed`
        raise UserError(
            f"cannot write {error.filename or part}: {error.strerror}. Fix this and rerun the "
            "command; the download will resume."
        ) from None
    raise Unavailable(item.file, failures)


def _is_expected(final: Path, item: Download, meter: Meter) -> bool:
    """Return whether an existing file is the one to download; rename it if it is not."""
    # Published checksums first: a file that matches one needs no ``FILE.sha256``.
    mirrors = sorted(item.mirrors, key=lambda mirror: mirror.checksum is None)
    if any(_complaint(final, final, mirror.checksum, meter) is None for mirror in mirrors):
        meter.say(f"{final} already exists")
        return True
    aside = Path(f"{final}.bad")
    os.replace(final, aside)
    meter.say(f"{final} is not the expected file: renamed to {aside.name}")
    return False


@dataclass(frozen=True)
class _Origin:
    """Where the bytes of a part came from, so that only bytes of the same file are appended."""

    url: str
    checksum: str | None
    validator: str | None
    total: int | None


class _Failed(Exception):
    """A mirror did not deliver; `passing` if a retry may succeed."""

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(printable(reason))
        self.passing = passing


class _Transfer:
    """The transfer of a file from one mirror, which may stall, disconnect, or send garbage."""

    def __init__(
        self, mirror: Mirror, final: Path, limit: int, meter: Meter, patience: Patience
    ) -> None:
        self.mirror, self.final, self.limit = mirror, final, limit
        self.meter, self.patience = meter, patience
        self.part, self.note = Path(f"{final}.part"), Path(f"{final}.part.json")
        self.received, self.start = 0, time.monotonic()
        self.pieced = False  # whether the part consists of several answers

    def run(self) -> None:
        """Download the file, or raise `_Failed`."""
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
                self.meter.say(f"{url}: {failed}; retrying")
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
        """Request the missing bytes of the part and append them."""
        size = _size(self.part)
        origin = self._origin() if size else None
        if origin is not None and origin.total == size:
            self.pieced = True  # complete, but not yet verified
            return
        headers = {"User-Agent": f"steppe/{__version__}", "Accept-Encoding": "identity"}
        if origin is not None:
            headers["Range"] = f"bytes={size}-"
            if origin.url == self.mirror.url and origin.validator is not None:
                headers["If-Range"] = origin.validator  # asks for the whole file if it has changed
        with self._network():
            response = self._answer(urllib.request.Request(self.mirror.url, headers=headers))
        with response:
            self._receive(response, size, origin)

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Turn network errors into `_Failed`."""
        try:
            yield
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise self._changed() from None
            reason = f"HTTP {error.code} {error.reason}"
            raise _Failed(reason, passing=error.code in _PASSING) from None
        except TimeoutError:
            raise _Failed(f"no response for {self.patience.timeout:g} s", passing=True) from None
        except urllib.error.URLError as error:
            unknown_host = isinstance(error.reason, socket.gaierror)
            raise _Failed(str(error.reason), passing=not unknown_host) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Failed(str(error) or type(error).__name__, passing=True) from None

    def _answer(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Return the response once it begins, within a total time: Python's limit is per byte."""
        answer: Future[http.client.HTTPResponse] = Future()
        timeout = self.patience.timeout

        def ask() -> None:
            try:
                answer.set_result(urllib.request.urlopen(request, timeout=timeout))
            except Exception as error:
                answer.set_exception(error)

        # A thread that is too late keeps running, and its response is dropped.
        threading.Thread(target=ask, daemon=True).start()
        return answer.result(2 * timeout)

    def _changed(self) -> _Failed:
        self.part.unlink(missing_ok=True)
        return _Failed("the file has changed on the server", passing=True)

    def _receive(
        self, response: http.client.HTTPResponse, size: int, origin: _Origin | None
    ) -> None:
        """Append a response to the part, or start the part over with it."""
        added = response.status == http.client.PARTIAL_CONTENT
        if added and (origin is None or not self._continues(response.headers, size, origin)):
            raise self._changed()
        chunks, head = self._chunks(response), b""
        while len(head) < _HEAD and (chunk := next(chunks, b"")):
            head += chunk
        self.pieced |= added
        if not added or origin is None:  # the whole file, requested or not
            reason = _not_the_file(self.final.name, head, response.headers)
            if reason is not None:  # raise before the existing part is deleted
                raise _Failed(reason)
            size, origin = 0, self._begun(response.headers)
            self.part.unlink(missing_ok=True)
            self.note.write_text(json.dumps(asdict(origin)))
        total = origin.total
        most = self.limit if total is None else total
        with self.part.open("ab", buffering=0) as file:  # so that Ctrl-C loses no bytes
            for chunk in itertools.chain([head], chunks):
                size += len(chunk)
                if size > most:
                    self.part.unlink()
                    raise _Failed(f"it sent more than {decimal(most)}; deleted the file")
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]
                self.meter.update(size, total=total)
            os.fsync(file.fileno())
        if total is not None and size != total:
            raise _Failed(f"the connection closed after {size} of {total} bytes", passing=True)

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yield received bytes; raise `_Failed` if the mirror is too slow."""
        while True:
            with self._network():
                chunk = response.read1(_CHUNK)
            self.received += len(chunk)
            elapsed = time.monotonic() - self.start
            if elapsed > self.patience.grace + self.received / self.patience.rate:
                raise _Failed(f"too slow: {decimal(self.received)} in {elapsed:.0f} s")
            if not chunk:
                return
            yield chunk

    def _begun(self, headers: Message) -> _Origin:
        length = headers.get("Content-Length", "").strip()
        total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        if total is not None and total > self.limit:
            raise _Failed(f"its size is {decimal(total)}, more than {decimal(self.limit)}")
        return _Origin(self.mirror.url, self.mirror.checksum, _validator(headers), total)

    def _origin(self) -> _Origin | None:
        """Return the part's origin if this mirror has the same bytes, or None.

        Bytes are the same if the checksum is, whichever mirror began the part, or if the URL is the
        same and has a validator.
        """
        try:
            origin = _Origin(**parse(read(self.note)))
        except (OSError, ValueError, TypeError):  # absent, or truncated by a crash
            return None
        same_bytes = self.mirror.checksum is not None and self.mirror.checksum == origin.checksum
        same_file = self.mirror.url == origin.url and origin.validator is not None
        return origin if same_bytes or same_file else None

    def _continues(self, headers: Message, size: int, origin: _Origin) -> bool:
        """Return whether a partial response continues our file at byte `size`."""
        match = re.fullmatch(
            r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18}|\*)", headers.get("Content-Range", "").strip()
        )
        if match is None or int(match[1]) != size:
            return False
        if match[2] != "*" and origin.total not in (None, int(match[2])):
            return False
        return origin.url != self.mirror.url or _validator(headers) in (None, origin.validator)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _validator(headers: Message) -> str | None:
    """Return the server's identifier of this version of the file for If-Range, or None."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _not_the_file(name: str, head: bytes, headers: Message) -> str | None:
    """Return why a response is not the requested file, such as a web page; None if it may be."""
    magic = _MAGIC.get(Path(name).suffix)
    if magic is not None and head.startswith(magic):
        return None
    start = head.lstrip().lower()
    if headers.get_content_type() == "text/html" or start.startswith((b"<!doctype html", b"<html")):
        title = re.search(rb"<title[^>]*>(.*?)</title>", head, re.IGNORECASE | re.DOTALL)
        said = f" ({title[1].decode(errors='replace').strip()!r})" if title else ""
        return f"sent a web page{said} instead of the file"
    return None if magic is None else f"sent something that is not a {Path(name).suffix} file"


def _complaint(path: Path, final: Path, checksum: str | None, meter: Meter) -> str | None:
    """Return what is wrong with a downloaded file, or None."""
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if checksum is not None:
        return None if found == expected else f"its {algorithm} is {found}, expected {expected}"
    note = Path(f"{final}.sha256")
    if not note.exists():
        note.write_text(f"{found}  {final.name}\n")  # as sha256sum writes it
        meter.say(f"{final.name} has no published checksum; saved its sha256 {found} in {note}")
        return None
    noted = note.read_text().partition(" ")[0]
    if found == noted:
        return None
    return (
        f"its sha256 is {found}, but the first download had {noted} (to accept the new file, "
        f"delete {note})"
    )
