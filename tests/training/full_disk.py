"""The command line on a disk that fills up at a given operation on a file, then again with room.

For `tests.processes.run`: in a process whose limits and mounts are its own.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from steppe import cli

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000


def mount(folder: Path) -> None:
    """A file system of 2 MB that no other process sees, without rights of root."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def try_mount(folder: Path) -> None:
    """Leaves in ``reason`` why that cannot be done here."""
    reason = ""
    (folder / "try").mkdir()
    try:
        mount(folder / "try")
    except OSError as error:
        reason = str(error)
    (folder / "reason").write_text(reason)


class Disk:
    """One that is full when it is told, or a limit on the size of files."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder, self.filler = how, folder, folder / "filler"
        if how == "tmpfs":
            mount(folder)
        self.waiting: dict[str, Any] | None = None
        sys.addaudithook(self.watch)

    def watch(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            self.waiting
            and event == self.waiting["event"]
            and str(args[0]).endswith(self.waiting["path"])
        ):
            self.waiting["times"] -= 1
            if not self.waiting["times"]:
                leave, self.waiting = self.waiting["leave"], None
                self.fill(leave)

    def fill(self, leave: int) -> None:
        if self.how == "tmpfs":
            with self.filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            os.truncate(self.filler, max(0, self.filler.stat().st_size - leave))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (leave, resource.RLIM_INFINITY))

    def make_room(self) -> None:
        if self.how == "tmpfs":
            self.filler.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def steppe(words: list[str]) -> tuple[Any, str, str]:
    sys.argv = ["steppe", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue()


def meet(how: str, folder: Path, seen: Path, faults: dict[str, Any], words: list[str]) -> None:
    """Each fault on a run of its own; leaves what was said, and both states of the folder."""
    disk = Disk(how, folder)
    for name, fault in faults.items():
        out = folder / f"run, {name}"
        disk.waiting = fault
        first = steppe([*words, "--out", str(out)])
        disk.make_room()
        shutil.copytree(out, seen / name / "failed")
        second = steppe([*words, "--out", str(out), "--resume"])
        shutil.copytree(out, seen / name / "resumed")
        (seen / name / "seen.json").write_text(json.dumps([first, second]))
        shutil.rmtree(out)
