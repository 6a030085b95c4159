"""Settings every test shares."""

import pytest
import torch
from hypothesis import settings

from tests.devices import DEVICES

# Workers of pytest-xdist share the cores, and one thread makes reductions repeatable.
torch.set_num_threads(1)

# The first example pays for torch's lazy set-up, which a deadline would take for slowness.
settings.register_profile("steppe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steppe")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.hookimpl(trylast=True)  # what `-m` leaves out is gone by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or torch.cuda.is_available():
        return
    if len(gpu_items) == len(
        items
    ):  # asked for by themselves: skipping all would look like success
        raise pytest.UsageError(
            "only tests marked gpu are selected, and torch finds no CUDA here: run them on a "
            "machine with a GPU"
        )
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs CUDA"))
