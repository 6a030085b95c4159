"""Files, names and texts that somebody else may have made, and hints that show a command."""

import json
import os
import re
import shlex
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

LIMIT = 2**30
"""Bytes that no file of text has."""


def read(path: Path | str, limit: int = LIMIT) -> bytes:
    """Reads a file whole; an OSError where it is not a plain one or has more than `limit` bytes."""
    with plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            why = f"{size:,} bytes, more than the {limit:,} expected"
            raise OSError(None, why, os.fspath(path))
        # Python makes room for all that is asked for; what /proc has is said to be empty.
        return file.read(size or min(limit, 2**20))


def plain(path: Path | str) -> BufferedReader:
    """Opens a plain file; an OSError where it is a FIFO or a device, which may never end."""
    # Not to wait for whoever writes to a FIFO.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a plain file", os.fspath(path))
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def parse(data: bytes | str) -> Any:
    """Reads JSON.

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


# Control codes but for tab and newline; bidirectional marks; line separators; half characters.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def is_name(text: object) -> bool:
    r"""Whether a text is one name of a file or folder, and leads nowhere else.

    Examples:
        >>> [is_name(text) for text in ("PACS-fad-trial0", "..", "a/b", "/tmp", "", "a\x00b")]
        [True, False, False, False, False, False]
    """
    if not isinstance(text, str) or text in ("", ".", ".."):
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half a character, which JSON can hold and no file system has
        return False
    return not any(mark in text for mark in ("/", "\\", "\0"))


def printable(text: object) -> str:
    r"""A text without control codes, which a terminal would obey, and without half characters.

    Examples:
        >>> print(printable("a\x1b[31mred\nb"))
        a\x1b[31mred
        b
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], str(text))


def command(*words: object) -> str:
    """A command as one types it, for hints; a name with a blank or a quote is quoted.

    Examples:
        >>> command("steppe", "sweep", "run", "my sweeps")
        "steppe sweep run 'my sweeps'"
    """
    return printable(shlex.join(map(str, words)))
