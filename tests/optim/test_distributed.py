"""Two real processes (gloo) against one process on the joint batch."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steppe.optim import FAD, GENIE, SAM, GAMExact, Joined
from tests import processes
from tests.optim import reference
from tests.optim.problems import DIRECTED, EVERY, METHODS, named

WORLD = 2
STEPS = 4
FIRST_ORDER = [name for name in EVERY if name != "gam-exact"]
STATELESS = [name for name in FIRST_ORDER if name in DIRECTED and not METHODS[name].stateful]
REMEMBERING = [name for name in FIRST_ORDER if EVERY[name].remembers]
SHARDED = [name for name in FIRST_ORDER if not EVERY[name].make.draws]
UNLIKE = ["sam", "looksam", "wsam"]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def part(t: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(t)
    return x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]


def base(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def steps(model, opt, data, count=STEPS):
    for t in range(count):
        x, y = data(t)

        def closure(name="main", x=x, y=y):
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
            named(each, name).backward()
            return each.mean()

        opt.step(closure)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def counting(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state[0] += bucket.is_last()
    done = dist.all_reduce(bucket.buffer() / WORLD, async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def ddp(bucket_view: bool) -> tuple[DistributedDataParallel, list[int]]:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=bucket_view)
    reductions = [0]
    model.register_comm_hook(reductions, counting)
    return model, reductions


# What the processes run: each case takes its rank and returns tensors or numbers to compare.


def run_global(rank: int, name: str, bucket_view: bool):
    model, reductions = ddp(bucket_view)
    opt = EVERY[name](base(model), model=model)
    steps(model, opt, lambda t: part(t, rank))
    return weights(model), reductions[0]


def run_local(rank: int, name: str, bucket_view: bool):
    model, reductions = ddp(bucket_view)
    manual = 0
    plain = dist.all_reduce

    def watched(*args, **kwargs):
        nonlocal manual
        manual += 1
        return plain(*args, **kwargs)

    opt = EVERY[name](base(model), model=model, perturbation="local")
    dist.all_reduce = watched
    try:
        steps(model, opt, lambda t: part(t, rank))
    finally:
        dist.all_reduce = plain
    return weights(model), reductions[0] + manual


def run_local_ratio(rank: int):
    """Plain steps under perturbation='local' are DDP's own: reduced once, by DDP."""
    model, reductions = ddp(True)
    opt = SAM(base(model), model=model, perturbation="local", ratio=0.5)
    steps(model, opt, lambda t: part(t, rank))
    return weights(model), reductions[0]


def run_fsdp(rank: int, name: str):
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    opt = EVERY[name](base(model), model=model)
    steps(model, opt, lambda t: part(t, rank))
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def run_fsdp_noise(rank: int):
    """The noise of this process's shards, and whether it repeats."""
    model = network()
    fully_shard(model)
    found = []
    for _ in range(2):
        opt = METHODS["rwp"](base(model), model=model)
        for phase in opt.phases():
            with phase:
                found.append([p.to_local().detach().clone() for p in model.parameters()])
                x, y = part(0, rank)
                nn.functional.cross_entropy(model(x), y).backward()
    moved = [b - a for a, b in zip(found[0], found[1], strict=True)]
    return moved, all(map(torch.equal, found[1], found[3]))


def run_memory(rank: int, name: str):
    """Under perturbation='local', what enters later steps must be equal in all processes."""
    model, _ = ddp(True)
    opt = EVERY[name](base(model), model=model, perturbation="local")
    steps(model, opt, lambda t: part(t, rank))
    return weights(model), opt.state_dict()["steppe"]["memory"]


def genie(model: nn.Module, data, p: float) -> None:
    """The loss is scaled up, because noise needs large gradients."""
    opt = GENIE(model.parameters(), lr=1e-3, p=p)
    for t in range(STEPS):
        x, y = data(t)
        opt.zero_grad()
        (30 * nn.functional.cross_entropy(model(x), y)).backward()
        opt.step()


def run_genie(rank: int):
    model, _ = ddp(True)
    genie(model, lambda t: part(t, rank), p=0.3)
    return weights(model)


def run_sharded_genie(rank: int):
    """Shards draw noise of their own; here it is constant."""
    model = network()
    fully_shard(model)
    with mock.patch.object(torch.Tensor, "normal_", ones):
        genie(model, lambda t: part(t, rank), p=0.0)
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def ones(x: torch.Tensor, **_: object) -> torch.Tensor:
    return x.fill_(1.0)


def joined(model: nn.Module) -> Joined:
    params = list(model.parameters())
    adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01)
    sgd = torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.2, momentum=0.9)
    return Joined([sgd, adamw])


def run_joined(rank: int):
    model = network()
    fully_shard(model)
    steps(model, FAD(joined(model), rho=0.1, model=model), lambda t: part(t, rank))
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def run_passes(rank: int, name: str):
    """Two micro-batches in each process."""
    model, reductions = ddp(True)
    opt = EVERY[name](base(model), model=model)
    for t in range(STEPS):
        x, y = part(t, rank)
        for phase, (px, py) in opt.passes(zip(x.chunk(2), y.chunk(2), strict=True)):
            each = nn.functional.cross_entropy(model(px), py, reduction="none")
            (named(each, phase.loss) / 2).backward()
        opt.step()
    return weights(model), reductions[0]


class Branches(nn.Module):
    """Processes use the same branch or different ones of equal shape, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.double()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.norm(self.branches[which](x))


def run_branches(rank: int, name: str):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    opt = METHODS[name](base(model), model=model, perturbation="local")
    statistics = []
    model.module.norm.register_forward_pre_hook(
        lambda norm, _: statistics.append(norm.running_mean.clone())
    )
    for t in range(STEPS):
        x, y = part(t, rank)

        def closure(x=x, y=y, which=rank if t % 2 else 0):
            loss = nn.functional.cross_entropy(model(x, which), y)
            loss.backward()
            return loss

        opt.step(closure)
    unused = model.module.branches[2].weight
    return weights(model), unused.grad is None, statistics[-2]  # before the last step's first pass


def run_refusals(rank: int):
    messages = []
    model, _ = ddp(False)
    for make in (
        lambda: FAD(base(model), perturbation="local"),
        lambda: GAMExact(base(model), model=model),
        lambda: FAD(
            base(model),
            model=DistributedDataParallel(network(), static_graph=True),
            perturbation="local",
        ),
    ):
        try:
            make()
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    sharded = network()
    fully_shard(sharded)
    opt = FAD(base(sharded), model=sharded)
    opt.perturbation = "local"
    try:
        steps(sharded, opt, lambda t: part(t, rank), 1)
    except ValueError as error:
        messages.append(str(error))
    try:
        GAMExact(base(sharded), model=sharded)
    except TypeError as error:
        messages.append(str(error))
    return messages


CASES = {
    **{
        f"{kind} {n} bucket_view={v}": (run, n, v)
        for kind, run, names in (
            ("global", run_global, FIRST_ORDER),
            ("local", run_local, STATELESS),
        )
        for n in names
        for v in (True, False)
    },
    **{f"memory {n}": (run_memory, n) for n in REMEMBERING},
    "local ratio": (run_local_ratio,),
    **{f"fsdp {n}": (run_fsdp, n) for n in SHARDED},
    "fsdp noise": (run_fsdp_noise,),
    **{f"passes {n}": (run_passes, n) for n in FIRST_ORDER},
    "genie": (run_genie,),
    "sharded genie": (run_sharded_genie,),
    "joined": (run_joined,),
    **{f"branches {n}": (run_branches, n) for n in UNLIKE},
    "refusals": (run_refusals,),
}


def work(rank: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    results = {case: run(rank, *args) for case, (run, *args) in CASES.items()}
    torch.save(results, f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All cases in one process group: starting processes costs more than the cases do."""
    path = str(tmp_path_factory.mktemp("gloo"))
    processes.ranks(work, WORLD, path)
    return [torch.load(f"{path}/{rank}.pt") for rank in range(WORLD)]


def single(name: str) -> torch.Tensor:
    model = network()
    steps(model, EVERY[name](base(model), model=model), batch)
    return weights(model)


def m_sharpness(name: str) -> torch.Tensor:
    """Each process's direction from its own gradients, then the mean: from the reference."""
    model = network()
    shapes = [p.shape for p in model.parameters()]
    names = [n for n, _ in model.named_parameters()]

    def grad_on(x, y):
        def loss(theta):
            parts = theta.split([s.numel() for s in shapes])
            point = {n: t.reshape(s) for n, t, s in zip(names, parts, shapes, strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(model, point, (x,)), y)

        return torch.func.grad(loss)

    theta, update = weights(model), reference.SGD(0.2, 0.9, 0.0)
    for t in range(STEPS):
        directions = [METHODS[name].direction(grad_on(*part(t, r)), theta) for r in range(WORLD)]
        theta = update(theta, sum(directions) / WORLD)
    return theta


@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_global_is_one_process_on_the_joint_batch(results, name, bucket_view):
    expected = single(name)
    for rank in range(WORLD):
        got, reductions = results[rank][f"global {name} bucket_view={bucket_view}"]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert reductions == sum(map(EVERY[name].passes_at, range(STEPS)))


@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("name", STATELESS)
def test_local_is_m_sharpness_with_one_reduction(results, name, bucket_view):
    expected = m_sharpness(name)
    assert (expected - single(name)).abs().max() > 1e-6  # the two notions differ
    for rank in range(WORLD):
        got, reductions = results[rank][f"local {name} bucket_view={bucket_view}"]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert reductions == STEPS


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_passes_reduce_with_the_last_micro_batch_only(results, name):
    expected = single(name)
    for rank in range(WORLD):
        got, reductions = results[rank][f"passes {name}"]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert reductions == sum(map(EVERY[name].passes_at, range(STEPS)))


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_is_remembered_is_equal_in_all_processes(results, name):
    (first, memory), (second, others) = (r[f"memory {name}"] for r in results)
    assert torch.equal(first, second)
    assert (first - single(name)).abs().max() > 1e-6  # each process climbed along its own
    torch.testing.assert_close(memory, others, rtol=0, atol=0)


def test_shards_draw_noise_of_their_own(results):
    (first, repeats), (second, _) = (r["fsdp noise"] for r in results)
    assert repeats
    assert any(x.any() for x in first)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a.any())


@pytest.mark.parametrize("name", UNLIKE)
def test_processes_may_use_different_parameters(results, name):
    """Under find_unused_parameters replicas stay equal, and what nobody used is left alone."""
    (first, unused, statistics), (second, _, others) = (r[f"branches {name}"] for r in results)
    assert torch.equal(first, second)
    assert unused
    assert torch.equal(statistics, others)  # DDP still sends rank 0's buffers round


def test_plain_steps_of_a_local_ratio_are_reduced(results):
    (first, reductions), (second, _) = (r["local ratio"] for r in results)
    assert torch.equal(first, second)
    assert reductions == STEPS / 2


@pytest.mark.parametrize("name", SHARDED)
def test_fully_shard_is_one_process_on_the_joint_batch(results, name):
    expected = single(name)
    for rank in range(WORLD):
        torch.testing.assert_close(results[rank][f"fsdp {name}"], expected, rtol=0, atol=1e-12)


def test_genie_draws_the_same_in_all_processes(results):
    model = network()
    genie(model, batch, p=0.3)
    for rank in range(WORLD):
        torch.testing.assert_close(results[rank]["genie"], weights(model), rtol=0, atol=1e-10)
    assert torch.equal(*(r["genie"] for r in results))


def test_genies_noise_scale_is_that_of_the_whole_tensor(results):
    model, quiet = network(), network()
    for net, noise in ((model, ones), (quiet, torch.Tensor.zero_)):
        with mock.patch.object(torch.Tensor, "normal_", lambda x, n=noise, **_: n(x)):
            genie(net, batch, p=0.0)
    assert (weights(model) - weights(quiet)).abs().max() > 1e-4
    for rank in range(WORLD):
        found = results[rank]["sharded genie"]
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-10)


def test_joined_optimizers_may_be_sharded(results):
    model = network()
    steps(model, FAD(joined(model), rho=0.1, model=model), batch)
    for rank in range(WORLD):
        torch.testing.assert_close(results[rank]["joined"], weights(model), rtol=0, atol=1e-12)


def test_what_cannot_work_is_refused(results):
    local, exact, static, sharded, exact_sharded = results[0]["refusals"]
    assert "pass model=ddp" in local
    assert "all-reduce cannot be differentiated" in exact
    assert "static_graph" in static
    assert "does not support sharded parameters" in sharded
    assert "not possible for sharded parameters (FSDP2)" in exact_sharded
