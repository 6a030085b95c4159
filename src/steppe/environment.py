"""The provenance of a measurement: machine, versions, command."""

import datetime
import os
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from steppe import __version__

PACKAGES = ("torch", "torchvision", "timm", "pillow", "pytorch_optimizer")


def environment(device: torch.device, program: str = "steppe") -> dict[str, Any]:
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(program, sys.argv[1:]),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "steppe": __version__,
        **{name: v for name in PACKAGES if (v := _version(name)) is not None},
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def _command(program: str, arguments: list[str]) -> str:
    """The command line without this machine's folders and without --save."""
    words = [w for a in arguments for w in (a.split("=", 1) if a.startswith("--") else [a])]
    if "--save" in words:
        at = words.index("--save")
        del words[at : at + 2]
    return shlex.join([*program.split(), *(Path(w).name if "/" in w else w for w in words)])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()
