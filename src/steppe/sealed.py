"""JSON objects that carry a checksum, so that no flipped bit passes for another value.

The checksum is the last entry, a CRC-32 of all the text before it. Objects without one, which
earlier versions wrote, stay valid.
"""

import re
import zlib
from typing import Any

from .strangers import parse

KEY = "crc32"
_BEFORE = f', "{KEY}": "'.encode()
_SEAL = re.compile(rb',\s*"crc32":\s*"([0-9a-f]{8})"\s*\}\s*$')


class Broken(ValueError):
    """A text that differs from its checksum."""


def seal(text: str) -> bytes:
    """Adds the checksum to the text of a JSON object that has at least one entry.

    Examples:
        >>> seal('{"step": 3}')
        b'{"step": 3, "crc32": "d3a4e216"}'
    """
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f', "{KEY}": "{zlib.crc32(body):08x}"}}'.encode()


def broken(line: bytes) -> bool:
    """Whether a line that `seal` wrote differs from its checksum; one without a checksum does not.

    Quick: it looks where the checksum of a line is, and parses nothing.

    Examples:
        >>> line = seal('{"step": 3}')
        >>> broken(line), broken(line.replace(b"3,", b"2,")), broken(b'{"step": 3}')
        (False, True, False)
    """
    if line[-22:-10] != _BEFORE:
        return False
    return line[-10:-2] != b"%08x" % zlib.crc32(line[:-22])


def unseal(data: bytes) -> dict[str, Any]:
    """Reads a JSON object, less its checksum.

    Raises:
        ValueError: it is not a JSON object, or, as `Broken`, differs from its checksum.
    """
    found = _SEAL.search(data)
    if found and int(found[1], 16) != zlib.crc32(data[: found.start()]):
        raise Broken("it differs from its checksum")
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    value.pop(KEY, None)
    return value
