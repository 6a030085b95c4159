"""Builds the fault injector (`inject.c`), arms it, and reads what it counted."""

import ctypes
import errno
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("inject.c")
_TALLY = struct.Struct("qq")


def compiler() -> str | None:
    """What builds it, where there is something that can."""
    return shutil.which(os.environ.get("CC", "cc")) if os.name == "posix" else None


def build(folder: Path) -> Path:
    """Compiles the injector."""
    found = compiler()
    assert found is not None
    library = folder / "inject.so"
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([found, *options, "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """What happens at which operation; see `inject.c` for the kinds."""

    kind: str
    at: int = 0

    @property
    def words(self) -> tuple[str, int]:
        """The kind as the injector takes it: its name, and the number of an error."""
        name, _, error = self.kind.partition(":")
        return ("fail", getattr(errno, error)) if name == "fail" else (self.kind, 0)


COUNT = Fault("count")


@dataclass(frozen=True)
class Tally:
    """The file that an armed process counts in."""

    path: Path

    def arm(self, folder: Path, fault: Fault) -> None:
        """Arms this process, into which the injector was preloaded, and those it forks."""
        library = ctypes.CDLL(None, use_errno=True)
        kind, number = fault.words
        where = os.fsencode(os.path.realpath(folder))
        arguments = (where, kind.encode(), number, ctypes.c_long(fault.at), os.fsencode(self.path))
        if library.inject_arm(*arguments):
            raise OSError(ctypes.get_errno(), "the injector cannot be armed")

    def read(self) -> tuple[int, int, str]:
        """How many operations there were, which of them met the fault (or 0), and what it was."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if len(data) < _TALLY.size:
            return 0, 0, ""
        count, fired = _TALLY.unpack_from(data)
        return count, fired, os.fsdecode(data[_TALLY.size :].split(b"\0")[0])
