"""Two real processes (gloo) that share batches, against one with the whole of them.

One process group for all algorithms: starting one takes longer than everything it does.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steppe.algorithms import algorithm_names, algorithm_spec
from steppe.training import RunDirectory, make_config
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from steppe.training.update import Passes, cut
from tests.processes import ranks
from tests.training.axes import config

WORLD = 2
STEPS = 5
OPTIMIZERS = ("sgd", "fad", "disam")
CASES = [(name, optimizer) for name in algorithm_names() for optimizer in OPTIMIZERS]
LINEAR = [name for name in algorithm_names() if algorithm_spec(name).linear]


def steps(name: str, optimizer: str, folder: Path, processes: Processes) -> dict[str, Any]:
    """A few steps, in float64; the draws of a step are those of its number in every process."""
    values = config(name, optimizer, {"name": "sma", "start": 2})
    # Batch norm normalizes by a process's own images: frozen, where one process is to be matched.
    values |= {"freeze_bn": name in LINEAR, "dropout": 0.0, "batch_size": 8}
    if name in ("DANN", "CDANN"):
        values["algorithm"] = {**values["algorithm"], "dropout": 0.0}
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Trainer(make_config(values), RunDirectory(folder), processes, "fp32")
        for step in range(STEPS):
            torch.manual_seed(step)
            trainer.step(trainer.sampling.batches(step))
        with trainer.averaging.applied():
            averaged = {k: v.clone() for k, v in trainer.algorithm.state_dict().items()}
        losses = trainer.losses.take(lambda sums: processes.sum(sums) / processes.world)
        return {"weights": trainer.algorithm.state_dict(), "averaged": averaged, "losses": losses}
    finally:
        torch.set_default_dtype(torch.float32)


def one_domain(folder: Path, processes: Processes) -> list[torch.Tensor]:
    """The gradient of a single domain's loss, with a batch in two parts."""
    values = config("MIRO", "disam", {"name": "none"})
    values |= {"freeze_bn": True, "dropout": 0.0, "batch_size": 8, "accumulate": 2}
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Trainer(make_config(values), RunDirectory(folder), processes, "fp32")
        parts = cut(trainer.sampling.batches(0), 2)
        prepared = [trainer.algorithm.prepare(part) for part in parts]
        optimizer = trainer.optimizers["main"]
        Passes(trainer.parallel)._closure(optimizer, "main", prepared, [])("domain:1")
        return [p.grad for p in trainer.algorithm.network.parameters() if p.requires_grad]
    finally:
        torch.set_default_dtype(torch.float32)


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    processes = Processes(torch.device("cpu"), rank, WORLD)
    found = {case: steps(*case, folder / f"{rank}", processes) for case in CASES}
    found["domain"] = one_domain(folder / f"{rank}", processes)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    ranks(worker, WORLD, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_which_losses_are_means_over_images() -> None:
    assert LINEAR == ["ERM", "Mixup", "DANN", "MIRO", "SD", "CLIPood"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", LINEAR)
def test_two_processes_do_what_one_does(two, tmp_path, name: str, optimizer: str) -> None:
    one = steps(name, optimizer, tmp_path, Processes(torch.device("cpu")))
    for found in two:
        for what in ("weights", "averaged"):
            close(found[name, optimizer][what], one[what])
        assert found[name, optimizer]["losses"] == pytest.approx(one["losses"], rel=1e-9)


def test_one_domains_gradient_is_that_of_all_its_images(two, tmp_path) -> None:
    one = one_domain(tmp_path, Processes(torch.device("cpu")))
    for found in two:
        torch.testing.assert_close(found["domain"], one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_processes_agree_with_each_other(two, case: tuple[str, str]) -> None:
    """Bit for bit, with what algorithms remember: a run has one set of weights."""
    first, second = (found[case]["weights"] for found in two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("name", [n for n in algorithm_names() if n not in LINEAR])
def test_the_others_depend_on_how_images_are_shared(two, tmp_path, name: str) -> None:
    """What the docs say: they compute something else, so no one should expect equality."""
    one = steps(name, "sgd", tmp_path, Processes(torch.device("cpu")))
    found = two[0][name, "sgd"]["weights"]
    same = [torch.allclose(found[k], v, rtol=1e-9, atol=1e-12) for k, v in one["weights"].items()]
    assert not all(same)
