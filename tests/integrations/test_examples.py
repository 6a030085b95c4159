"""Every example's weights against a plain loop written out here, on fewer images."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steppe import domains
from steppe.domains import Arrays, Domain
from steppe.optim import FAD
from tests.limits import seconds
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
IMAGES = 30
"""Of each domain: five of them make 150, which is two batches of 64."""

pytestmark = [
    # What Lightning says of few loader workers and of clusters is about the machine.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


def few(name):
    dataset = domains.load(name)
    cut = tuple(
        Domain(d.name, Arrays(d.images.pixels[:IMAGES]), d.labels[:IMAGES]) for d in dataset.domains
    )
    return dataclasses.replace(dataset, domains=cut)


def example(name):
    module = load_script(EXAMPLES / f"{name}.py")
    module.load = few
    return module


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def images_and_labels(held_out="75"):
    parts = [d for d in few("RotatedDigits").domains if d.name != held_out]
    pixels = torch.cat([torch.from_numpy(d.images.pixels) for d in parts])
    x = pixels.permute(0, 3, 1, 2) / 255
    return x, torch.cat([torch.from_numpy(d.labels) for d in parts])


def epochs(x, y, size, count, exhausted=True):
    """Batches of some epochs, in the order in which a loader with a generator draws them.

    A `for` loop asks for a batch after the last, and the sampler then draws once more; Lightning
    stops before.
    """
    order = torch.Generator().manual_seed(0)
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_(generator=order)  # its workers' seed
        indices = torch.randperm(len(x), generator=order)
        if exhausted:
            torch.randperm(len(x), generator=order)
        whole = len(x) // size * size
        # Stacked as loaders do: other strides of the one channel would choose other kernels.
        yield [(torch.stack([*x[part]]), y[part]) for part in indices[:whole].split(size)]


def cosine(lr, step, steps):
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def equal(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def gap(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def printed_accuracy(capsys):
    last = capsys.readouterr().out.splitlines()[-1]
    assert "75 degrees" in last
    assert 0.0 <= float(last.split()[-1]) <= 1.0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_plain_pytorch_is_algorithm_1(float64, capsys, micro_batches):
    """The paper's lines written out, with momentum, decay, clipping and the schedule beside."""
    module = example("plain_pytorch")
    trained = module.main(epochs=2, rho=0.1, micro_batches=micro_batches, device="cpu")
    printed_accuracy(capsys)

    torch.manual_seed(0)
    model = module.small_cnn()
    params = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in params]

    def gradient(theta, parts, random_state):
        torch.set_rng_state(random_state)
        with torch.no_grad():
            for p, value in zip(params, theta, strict=True):
                p.copy_(value)
        loss = sum(F.cross_entropy(model(x), y) for x, y in parts) / len(parts)
        return torch.autograd.grad(loss, params)

    def towards(theta, v, rho=0.1):
        norm = torch.sqrt(sum((part**2).sum() for part in v))
        return [t + rho * part / (norm + 1e-12) for t, part in zip(theta, v, strict=True)]

    def minus(v, w):
        return [a - b for a, b in zip(v, w, strict=True)]

    step = 0
    for batches in epochs(*images_and_labels(), 64, 2):
        for x, y in batches:
            parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))
            theta = [p.detach().clone() for p in params]
            state = torch.get_rng_state()
            g0 = gradient(theta, parts, state)
            buffers = [b.clone() for b in model.buffers()]
            after = torch.get_rng_state()
            g1 = gradient(towards(theta, g0), parts, state)
            h0 = minus(g1, g0)
            theta2 = towards(theta, h0)
            g2 = gradient(theta2, parts, state)
            g3 = gradient(towards(theta2, g2), parts, state)
            h1 = minus(g3, g2)
            direction = [g + 0.25 * a + 0.25 * b for g, a, b in zip(g0, h0, h1, strict=True)]
            norm = torch.sqrt(sum((d**2).sum() for d in direction))
            clip = min(1.0, 1.0 / (norm.item() + 1e-6))
            lr = cosine(0.1, step, 4)
            torch.set_rng_state(after)
            with torch.no_grad():
                for b, value in zip(model.buffers(), buffers, strict=True):
                    b.copy_(value)
                for p, t, v, d in zip(params, theta, velocity, direction, strict=True):
                    v.mul_(0.9).add_(clip * d + 1e-4 * t)
                    p.copy_(t - lr * v)
            step += 1
    assert step == 4
    assert gap(trained, model) < 1e-10  # float64, summed in another order


def test_lightning_automatic_equals_the_plain_loop(capsys):
    module = example("lightning_automatic")
    trained = module.main(epochs=2, accelerator="cpu")
    printed_accuracy(capsys)

    torch.manual_seed(0)
    model = module.Digits(rho=0.05, steps=4).network
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
    for batches in epochs(*images_and_labels(), 64, 2, exhausted=False):
        for x, y in batches:

            def closure(x=x, y=y):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            opt.step(closure)
            scheduler.step()
    assert equal(trained, model)


def test_lightning_manual_equals_the_plain_loop(capsys):
    module = example("lightning_manual")
    trained = module.main(epochs=2, accumulate=3, accelerator="cpu")
    printed_accuracy(capsys)

    torch.manual_seed(0)
    model = module.Digits(rho=0.05, steps=4, accumulate=3).network
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
    for batches in epochs(*images_and_labels(), 32, 2, exhausted=False):
        assert len(batches) == 4
        for parts in (batches[:3], batches[3:]):  # the last step of an epoch has one batch
            for phase in opt.phases():
                with phase:
                    for x, y in parts:
                        (F.cross_entropy(model(x), y) / len(parts)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            opt.step()
            scheduler.step()
    assert equal(trained, model)


def test_timm_equals_the_plain_loop(capsys):
    timm = pytest.importorskip("timm")
    module = example("timm_loop")
    trained, averaged = module.main(epochs=2, size=16, device="cpu")
    printed_accuracy(capsys)

    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=10, in_chans=1, drop_rate=0.1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 1e-4}]
    base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model)
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = images_and_labels()
    x = F.interpolate(x, size=16, mode="bilinear")
    step = 0
    for batches in epochs(x, y, 64, 2):
        for x, y in batches:
            # timm warms up from 1e-5 in a straight line over the first epoch of two updates; then
            # the cosine goes on from where it would have been.
            lr = 1e-5 + step * (0.1 - 1e-5) / 2 if step < 2 else cosine(0.1, step, 4)
            for group in opt.param_groups:
                group["lr"] = lr

            for phase in opt.phases():
                with phase:
                    F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            decay = min(1 - step ** (-2 / 3), 0.95) if step > 1 else 0.0
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    mean[name].lerp_(value, 1 - decay)
                else:
                    mean[name].copy_(value)
    # The rates above are timm's up to the last bit of float64, which float32 weights do not see.
    assert equal(trained, model)
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-5, atol=1e-7)  # other rounding


DRIVER = """
import os, sys, torch
sys.path.insert(0, {root!r})
from tests.integrations.test_examples import example

torch.set_default_dtype(torch.float64)
model = example("ddp").main(epochs=2, perturbation={perturbation!r}, cpu=True)
torch.save(model.state_dict(), "{folder}/" + os.environ["RANK"] + ".pt")
"""


def ddp_plain_loop(module):
    torch.manual_seed(0)
    model = module.small_cnn()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5)
    x, y = images_and_labels()
    for epoch in range(2):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for part in order[:128].split(64):

            def closure(part=part):
                F.cross_entropy(model(torch.stack([*x[part]])), y[part]).backward()

            opt.step(closure)
    return model


def test_ddp_in_one_process_equals_the_plain_loop(capsys):
    module = example("ddp")
    trained = module.main(epochs=2, cpu=True)
    printed_accuracy(capsys)
    assert equal(trained, ddp_plain_loop(module))


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", ["global", "local"])
def test_ddp_under_torchrun_equals_one_process_on_the_joint_batch(float64, tmp_path, perturbation):
    script = tmp_path / "train.py"
    script.write_text(DRIVER.format(root=str(ROOT), folder=tmp_path, perturbation=perturbation))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc-per-node", "2", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=seconds(1200),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(map(torch.equal, one.values(), other.values()))
    plain = ddp_plain_loop(example("ddp")).state_dict()
    apart = max((one[name] - plain[name]).abs().max() for name in plain)
    if perturbation == "global":
        assert apart < 1e-12  # float64, summed in another order
    else:
        assert 1e-6 < apart < 0.1  # each process climbed along its own gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain_pytorch", "lightning_automatic", "lightning_manual", "timm_loop", "ddp"]
)
def test_the_command_line_runs(name):
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--epochs", "1"],
        timeout=seconds(1200),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "accuracy at 75 degrees" in run.stdout
