"""On a GPU: a step of any algorithm leaves the host free to run ahead, in any precision."""

import pytest
import torch

from steppe.algorithms import algorithm_names
from steppe.domains.batches import Batch
from steppe.training import precision, setup
from steppe.training.config import Named
from steppe.training.processes import Processes
from steppe.training.update import mean_state, optimize
from tests.algorithms.test_contract import batches, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore::steppe.optim.precision.Bfloat16Warning"),
]
CHOSEN = Named(name="fad", lr=0.01, rho=0.05, alpha=0.5, beta=0.5, weight_decay=0.0, momentum=0.9)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("name", algorithm_names())
def test_a_step_never_waits(name: str, mode: str) -> None:
    device = torch.device("cuda")
    algorithm = build(name).to(device)
    optimizers = {
        o.name: setup.optimizer(CHOSEN, o, algorithm)
        for o in algorithm.objectives()
        if o.optimizer is None
    }
    data = [Batch(b.images.to(device), b.labels.to(device)) for b in batches()]
    before = {key: value.clone() for key, value in algorithm.state_dict().items()}
    for step in range(3):
        torch.cuda.synchronize()
        # The first steps may load kernels and fill caches.
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            with precision.autocast(mode, device):
                prepared = algorithm.prepare(data)
            firsts = {}
            for objective in algorithm.objectives():
                (firsts[objective.name],) = optimize(
                    optimizers[objective.optimizer or objective.name],
                    algorithm,
                    objective.name,
                    [prepared],
                    precision.autocast(mode, device),
                )
            algorithm.commit(prepared, mean_state([firsts], Processes(device)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    after = algorithm.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    learned = {n for n, p in algorithm.named_parameters() if p.requires_grad}
    assert all(not torch.equal(after[n], before[n]) for n in learned if "bias" not in n)
