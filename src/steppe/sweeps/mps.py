"""Let the workers on a GPU compute at the same time, through NVIDIA's Multi-Process Service (MPS).

Without it, processes that share a GPU take turns. A launcher starts a daemon of its own for its
workers, in a private folder, so that other programs are not affected. A keeper, a shell that waits
for the end of a pipe, stops the daemon. The launcher and its workers hold the other end of the
pipe, so the daemon stops after the last of them ends, even if all are killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("steppe")

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
"""The variable by which a program finds its daemon."""
_SECONDS = 30
"""Time for the daemon to start or stop."""
_KEEPER = f'cat; echo quit | {CONTROL}; rm -rf "${FOLDER}"'
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
if code := cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
    raise SystemExit(f"CUDA error {code}")
"""
"""A program that needs the daemon, in little time."""


@dataclass(frozen=True)
class Sharing:
    """How workers share a GPU.

    Attributes:
        variables: environment variables for the workers.
        files: descriptors for the workers to inherit.
        refused: why they take turns; empty if they do not.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    files: tuple[int, ...] = ()
    refused: str = ""


@contextmanager
def sharing() -> Iterator[Sharing]:
    """Start a daemon for the workers of a launcher, unless the user has one, and stop it."""
    if shutil.which(CONTROL) is None:
        yield Sharing(refused=f"{CONTROL} was not found")
        return
    if not _failure([CONTROL], os.environ, "get_server_list"):
        yield Sharing()  # workers find the user's daemon as this process did
        return
    # Not in $TMPDIR, which may be long: the path of a socket has at most 108 characters.
    folder = tempfile.mkdtemp(prefix="steppe-mps-", dir="/tmp")
    variables = {FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    theirs = {**os.environ, **variables}
    # The daemon serves all GPUs: it would renumber a part of them, and workers choose theirs.
    own = {name: value for name, value in theirs.items() if name != "CUDA_VISIBLE_DEVICES"}
    reading, writing = os.pipe()
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of Ctrl-C
        env=theirs,
    )
    os.close(reading)
    try:
        refused = _failure([CONTROL, "-d"], own) or _failure([sys.executable, "-c", _PROBE], theirs)
        yield Sharing(refused=refused) if refused else Sharing(variables, (writing,))
    finally:
        os.close(writing)
        try:
            keeper.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the MPS daemon in %s does not stop", folder)


def _failure(command: list[str], variables: Mapping[str, str], typed: str = "") -> str:
    """Run a command; return why it failed, or nothing."""
    try:
        # To a file and not a pipe, which the daemon would keep open.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                command,
                input=f"{typed}\n",
                stdout=output,
                stderr=output,
                env=variables,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
            output.seek(0)
            said = output.read().strip().rpartition("\n")[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL}: {error}"
    return (said or f"{CONTROL} exited with {done.returncode}") if done.returncode else ""
