"""Losses by name, against autograd through one float64 graph of the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Algorithm, Network, algorithm_names, build_algorithm
from steppe.errors import UserError
from steppe.optim import DISAM, SAM
from steppe.training import RunDirectory, make_config, train
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from steppe.training.update import Passes, cut
from tests.algorithms.oracles import MEAN, N_CLASSES, STD, make_batches, make_network
from tests.training.axes import OPTIONS, config

LAM = 0.7
SIZES = (4, 4, 4)


def build(name: str, network: Network | None = None) -> Algorithm:
    own = {key: v for key, v in OPTIONS.get(name, {}).items() if key != "dropout"}
    network = make_network(dropout=0.5) if network is None else network
    return build_algorithm(name, network, len(SIZES), **own).double()


def prepared(algorithm: Algorithm, parts: int) -> list[Any]:
    torch.manual_seed(3)
    return [algorithm.prepare(part) for part in cut(make_batches(SIZES), parts)]


def asked(algorithm: Algorithm, parts: list[Any], name: str, **given: Any) -> list[Tensor]:
    """The gradient that the trainer's closure leaves for a loss."""
    params = [p for p in algorithm.parameters() if p.requires_grad]
    opt = DISAM(torch.optim.SGD(params, lr=0.1), lam=LAM)
    objective = given.pop("objective", "main")
    firsts: list[Any] = []
    closure = Passes(algorithm, **given)._closure(opt, objective, parts, firsts)
    algorithm.zero_grad()
    value = closure(name)
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
    if not name.startswith("domain"):
        torch.testing.assert_close(value, torch.stack([f.total for f in firsts]).mean())
        assert firsts[0].logits is None
    return found


def gradient(algorithm: Algorithm, value: Tensor) -> list[Tensor]:
    params = [p for p in algorithm.parameters() if p.requires_grad]
    return list(torch.autograd.grad(value, params, materialize_grads=True))


def domain_losses(algorithm: Algorithm, part: Any) -> Tensor:
    """Each domain's mean cross-entropy, one domain at a time."""
    keep = part.split(part.keep)
    rows = zip(part.split(part.images), part.split(part.labels), keep, strict=True)
    return torch.stack([F.cross_entropy(algorithm.network(x, k), y) for x, y, k in rows])


def variance(losses: Tensor) -> Tensor:
    return (losses - losses.mean()).square().sum() / len(losses)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["ERM", "CORAL", "VREx", "GroupDRO", "DANN", "Fishr", "MLDG"])
def test_the_ascent_loss_is_the_formula(name: str, parts: int) -> None:
    """MLDG has no logits of every image, so its domains' losses take another forward."""
    algorithm = build(name)
    given = prepared(algorithm, parts)
    total = torch.stack([algorithm(part).total for part in given]).mean()
    losses = torch.stack([domain_losses(algorithm, part) for part in given]).mean(0)
    expected = gradient(algorithm, total - LAM * variance(losses))
    found = asked(algorithm, given, "ascent")
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)
    plain = asked(algorithm, given, "main")
    assert any(not torch.allclose(f, p, rtol=1e-3) for f, p in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["ERM", "MTL"])
def test_parts_do_what_the_whole_batch_does(name: str) -> None:
    """Of MTL, with embeddings of the step alone left out, so that parts do not change the loss."""
    algorithm = build(name, make_network())
    if name == "MTL":
        algorithm.ema = 0.0
    whole, halves = (asked(algorithm, prepared(algorithm, n), "ascent") for n in (1, 2))
    torch.testing.assert_close(halves, whole, rtol=1e-11, atol=1e-14)


def test_mixups_domains_keep_their_places_whatever_the_order() -> None:
    algorithm = build("Mixup", make_network())
    for seed in range(6):
        torch.manual_seed(seed)
        part = algorithm.prepare(make_batches(SIZES))
        assert torch.equal(part.labels, torch.cat([b.labels for b in make_batches(SIZES)]))
        losses = algorithm(part)
        torch.testing.assert_close(algorithm.risks(part, losses.logits).mean(), losses.total)


def test_a_loss_scale_multiplies_whatever_is_differentiated() -> None:
    algorithm = build("ERM")
    parts = prepared(algorithm, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for name in ("ascent", "domain:1"):
        plain, scaled = asked(algorithm, parts, name), asked(algorithm, parts, name, scaler=scaler)
        torch.testing.assert_close([g / 1024 for g in scaled], plain, rtol=1e-12, atol=0.0)


class Noisy(nn.Module):
    """Draws by itself, and normalizes by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(48, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x.flatten(1))).tanh(), 0.5)


@pytest.mark.parametrize("name", ["ERM", "MLDG"])
def test_another_forward_changes_neither_statistics_nor_draws(name: str) -> None:
    torch.manual_seed(0)
    network = Network(Noisy(), 6, N_CLASSES, MEAN, STD, freeze_bn=False).double()
    algorithm = build(name, network)
    parts = prepared(algorithm, 2)
    start = {k: v.clone() for k, v in algorithm.state_dict().items()}
    after = []
    for loss in ("main", "ascent"):
        algorithm.load_state_dict(start)
        torch.manual_seed(5)
        found = asked(algorithm, parts, loss)
        kept = {k: v.clone() for k, v in algorithm.state_dict().items()}
        after.append((kept, torch.rand(3)))
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)
    if name == "ERM":
        torch.manual_seed(5)
        logits = [algorithm.network(part.images) for part in parts]
        totals = [F.cross_entropy(z, p.labels) for z, p in zip(logits, parts, strict=True)]
        losses = [algorithm.risks(p, z) for z, p in zip(logits, parts, strict=True)]
        value = torch.stack(totals).mean() - LAM * variance(torch.stack(losses).mean(0))
        torch.testing.assert_close(found, gradient(algorithm, value), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["ERM", "CORAL", "MLDG"])
def test_one_domains_loss_is_that_of_its_images(name: str, parts: int) -> None:
    algorithm = build(name)
    given = prepared(algorithm, parts)
    for number in range(3):
        losses = [domain_losses(algorithm, part)[number] for part in given]
        expected = gradient(algorithm, torch.stack(losses).mean())
        found = asked(algorithm, given, f"domain:{number}")
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


class Tiny(nn.Module):
    """A backbone with stages, for all algorithms."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 4, 3, padding=1)
        self.body, self.head = nn.Conv2d(4, 5, 3), nn.Conv2d(5, 6, 2)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(self.stem(x).tanh()))
        return self.head(x.tanh()).flatten(1).tanh()


@pytest.mark.parametrize("name", algorithm_names())
def test_one_domain_alone_is_the_same_as_among_the_others(name: str) -> None:
    from steppe.algorithms.network import Stage

    torch.manual_seed(0)
    stages = [Stage("stem", 4), Stage("body", 5), Stage("head", 6)]
    network = Network(Tiny(), 6, N_CLASSES, MEAN, STD, 0.3, stages=stages).double()
    algorithm = build(name, network)
    if name == "ARM":
        algorithm.context.eval()  # its batch norm would see other images
    (part,) = prepared(algorithm, 1)
    logits = algorithm(part).logits
    assert (logits is None) == (name in ("Fish", "MASF", "MLDG"))
    among = algorithm.risks(part, logits)
    assert among.shape == (3,)
    alone = torch.stack([algorithm.risk(part, number) for number in range(3)])
    if name in ("RSC", "SagNet", "MixStyle", "pAdaIN"):  # which change features across images
        assert alone.isfinite().all()
    else:
        torch.testing.assert_close(alone, among, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", ["DANN", "SagNet"])
def test_objectives_other_than_the_main_one_climb_their_own_loss(name: str) -> None:
    algorithm = build(name)
    parts = prepared(algorithm, 1)
    for objective in algorithm.objectives():
        own, ascent = (
            asked(algorithm, parts, loss, objective=objective.name) for loss in ("main", "ascent")
        )
        same = all(map(torch.equal, own, ascent))
        assert same == (objective.name != "main")


DIGITS = config("ERM", "disam", {"name": "none"})


def weights(folder: Path, **changes: Any) -> Tensor:
    values = {**DIGITS, **changes}
    run = Trainer(make_config(values), RunDirectory(folder), Processes(torch.device("cpu")), "fp32")
    for step in range(3):
        torch.manual_seed(step)
        run.step(run.sampling.batches(step))
    return torch.cat([p.detach().flatten() for p in run.algorithm.parameters()])


@pytest.mark.parametrize("method", ["sam", "fad"])
@pytest.mark.parametrize("algorithm", ["ERM", "MLDG"])
def test_without_lam_it_is_the_method_itself(tmp_path: Path, method: str, algorithm: str) -> None:
    name = "disam" if method == "sam" else f"disam-{method}"
    plain, zero, some = (
        weights(tmp_path, algorithm=algorithm, optimizer={"lr": 0.1, "rho": 0.5, **optimizer})
        for optimizer in ({"name": method}, {"name": name, "lam": 0}, {"name": name, "lam": 0.5})
    )
    assert torch.equal(plain, zero)
    assert not torch.equal(plain, some)


def test_trains_and_records_the_main_loss(tmp_path: Path) -> None:
    first, second = (
        train(make_config({**DIGITS, "optimizer": {"name": name, "lr": 0.01}}), tmp_path / name)[0]
        for name in ("sam", "disam")
    )
    assert first["loss"] == second["loss"]  # of the first step, at equal weights


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "sam", "ascent": "ascent"}, "SAM has no lam.* Choose disam"),
        ({"name": "disam", "ascent": "else"}, "DISAM asks for the loss 'else'"),
    ],
)
def test_a_loss_that_the_trainer_lacks(tmp_path: Path, optimizer: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        weights(tmp_path, optimizer={"lr": 0.1, **optimizer})


def test_lam_is_checked() -> None:
    base = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for lam in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="lam must be a finite number, at least 0"):
            DISAM(base, lam=lam)
    assert isinstance(DISAM(base, 0.1, lam=0.5), SAM)
