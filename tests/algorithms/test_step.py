"""A step of any algorithm trains in any precision; on a GPU the host is free to run ahead."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from steppe.algorithms import algorithm_names
from steppe.domains.batches import Batch
from steppe.training import precision, setup
from steppe.training.config import Named
from steppe.training.processes import Processes
from steppe.training.update import Passes, mean_state
from tests.algorithms.test_contract import batches, build
from tests.devices import never_waiting

CHOSEN = Named(name="fad", lr=0.01, rho=0.05, alpha=0.5, beta=0.5, weight_decay=0.0, momentum=0.9)


@pytest.mark.filterwarnings("ignore::steppe.optim.Bfloat16Warning")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("name", algorithm_names())
def test_a_step_trains_and_never_waits(name: str, mode: str, device: torch.device) -> None:
    algorithm = build(name).to(device)
    optimizers = {
        o.name: setup.optimizer(CHOSEN, o, algorithm)
        for o in algorithm.objectives()
        if o.optimizer is None
    }
    data = [Batch(b.images.to(device), b.labels.to(device)) for b in batches()]
    before = {key: value.clone() for key, value in algorithm.state_dict().items()}
    autocast = partial(precision.autocast, mode, device)
    for step in range(3):
        # The first steps may load kernels and fill caches.
        with never_waiting(device) if step == 2 else nullcontext():
            with autocast():
                prepared = algorithm.prepare(data)
            firsts = {}
            for objective in algorithm.objectives():
                (firsts[objective.name],) = Passes(algorithm, autocast).optimize(
                    optimizers[objective.optimizer or objective.name], objective.name, [prepared]
                )
            algorithm.commit(prepared, mean_state([firsts], Processes(device)))
    after = algorithm.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    learned = {n for n, p in algorithm.named_parameters() if p.requires_grad}
    assert all(not torch.equal(after[n], before[n]) for n in learned if "bias" not in n)
