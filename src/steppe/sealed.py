"""JSON objects with a checksum, which detects flipped bits.

The checksum is the last entry, a CRC-32 of all text before it. Objects without one, from earlier
versions, are valid too.
"""

import re
import zlib
from typing import Any

from .strangers import parse

KEY = "crc32"
_BEFORE = f', "{KEY}": "'.encode()
_SEAL = re.compile(rb',\s*"crc32":\s*"([0-9a-f]{8})"\s*\}\s*$')


class Broken(ValueError):
    """A JSON object does not match its checksum."""


def seal(text: str) -> bytes:
    """Add a checksum to a JSON object that has at least one entry.

    Examples:
        >>> seal('{"step": 3}')
        b'{"step": 3, "crc32": "d3a4e216"}'
    """
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f', "{KEY}": "{zlib.crc32(body):08x}"}}'.encode()


def broken(line: bytes) -> bool:
    """Whether a line from `seal` does not match its checksum, without parsing it.

    A line without a checksum is not broken.

    Examples:
        >>> line = seal('{"step": 3}')
        >>> broken(line), broken(line.replace(b"3,", b"2,")), broken(b'{"step": 3}')
        (False, True, False)
    """
    if line[-22:-10] != _BEFORE:
        return False
    return line[-10:-2] != b"%08x" % zlib.crc32(line[:-22])


def unseal(data: bytes) -> dict[str, Any]:
    """Parse a JSON object, and check and remove its checksum.

    Raises:
        Broken: it does not match its checksum.
        ValueError: it is not a JSON object.
    """
    found = _SEAL.search(data)
    if found and int(found[1], 16) != zlib.crc32(data[: found.start()]):
        raise Broken("it does not match its checksum")
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    value.pop(KEY, None)
    return value
