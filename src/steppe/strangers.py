"""Untrusted files, names and text, and shell commands for hints."""

import json
import os
import re
import shlex
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

LIMIT = 2**30
"""Size limit of text files, in bytes."""


def read(path: Path | str, limit: int = LIMIT) -> bytes:
    """Read a regular file; OSError if it is another kind of file or larger than `limit`."""
    with plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            why = f"{size:,} bytes, more than the {limit:,} expected"
            raise OSError(None, why, os.fspath(path))
        # Python allocates the requested size up front. Files in /proc report a size of 0.
        return file.read(size or min(limit, 2**20))


def plain(path: Path | str) -> BufferedReader:
    """Open a regular file; OSError for a FIFO or device, which may never end."""
    # Do not wait for a FIFO's writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a plain file", os.fspath(path))
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def parse(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("a number has thousands of digits") from None


# Control codes except tab and newline; bidirectional marks; line separators; lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def is_name(text: object) -> bool:
    r"""Whether a text is a single file name, which cannot lead to another folder.

    Examples:
        >>> [is_name(text) for text in ("PACS-fad-trial0", "..", "a/b", "/tmp", "", "a\x00b")]
        [True, False, False, False, False, False]
    """
    if not isinstance(text, str) or text in ("", ".", ".."):
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate, valid in JSON but not in file names
        return False
    return not any(mark in text for mark in ("/", "\\", "\0"))


def printable(text: object) -> str:
    r"""Escape control codes, which a terminal would interpret, and lone surrogates.

    Examples:
        >>> print(printable("a\x1b[31mred\nb"))
        a\x1b[31mred
        b
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], str(text))


def command(*words: object) -> str:
    """A shell command for a hint, quoted where needed.

    Examples:
        >>> command("steppe", "sweep", "run", "my sweeps")
        "steppe sweep run 'my sweeps'"
    """
    return printable(shlex.join(map(str, words)))
