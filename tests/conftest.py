"""Settings every test shares."""

import gc
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from steppe.domains.catalog import DATASETS
from tests.devices import DEVICES

# nohup and background jobs ignore Ctrl-C, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers of pytest-xdist share the cores, and one thread makes reductions repeatable.
torch.set_num_threads(1)


# The first example pays for torch's lazy set-up, which a deadline would take for slowness.
settings.register_profile("steppe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steppe")


LONGEST = [
    "axes",
    "smoke",
    "ray",
    "slurm",
    "local",
    "resume",
    "soak",
    "faults",
    "reproduce",
    "release",
    "figures",
]
"""Run first, so that workers of pytest-xdist have nothing long left at the end."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def steppe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[object, str, str]]]:
    """The command line in this process: gives the exit code, standard output and error."""
    from steppe import cli

    log = logging.getLogger("steppe")
    handlers, level = list(log.handlers), log.level

    def call(*command: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["steppe", *map(str, command)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    yield call
    log.handlers[:] = handlers
    log.setLevel(level)


def pytest_collection_finish() -> None:
    """Thousands of tests and all of torch are not looked through at every collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # some libraries report what is left at the end as leaked


@pytest.hookimpl(trylast=True)  # what `-m` leaves out is gone by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
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


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    """The plugin of small tasks, gone again after the module: other tests know what is built in."""
    name = "steppe.domains.tasks"
    known = {entry.name for entry in DATASETS.entries()}
    sys.modules.pop(name, None)  # so that importing it registers the tasks
    yield importlib.import_module(name)
    for entry in [entry for entry in DATASETS.entries() if entry.name not in known]:
        del DATASETS._table[entry.name.lower()]
    sys.modules.pop(name, None)
