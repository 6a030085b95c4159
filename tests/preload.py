"""What the server that `tests.processes` forks from imports, once: torch and all commands.

Nothing is computed here: a thread of torch's would be missing in what is forked.
"""

import pkgutil
from importlib import import_module

import torch

import steppe
from steppe.domains import load

torch.set_num_threads(1)
for part in pkgutil.walk_packages(steppe.__path__, "steppe."):
    if not part.name.startswith(("steppe.integrations", "steppe.__main__", "steppe.sweeps.ray")):
        import_module(part.name)
import_module("torch._dynamo")
load("RotatedDigits")
