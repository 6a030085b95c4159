"""Settings every test shares."""

import pytest
import torch
from hypothesis import settings

# Workers of pytest-xdist share the cores, and one thread makes reductions repeatable.
torch.set_num_threads(1)

# The first example pays for torch's lazy set-up, which a deadline would take for slowness.
settings.register_profile("steppe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steppe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs CUDA")
        for item in gpu_items:
            item.add_marker(skip)
