"""What a model holds besides the weights being optimized: only the first pass leaves a trace."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steppe.optim import FAD, SAM, AdaHessian, GAMExact
from steppe.optim.still import CHECK_EVERY
from steppe.optim.vectors import fingerprint
from tests.optim.problems import sgd

WRITES = {
    "in place": lambda t, s: t.lerp_(s, 0.5),
    "through .data": lambda t, s: t.data.lerp_(s.data, 0.5),
    "by a new .data": lambda t, s: setattr(t, "data", t.data.lerp(s.data, 0.5)),
}


class Teacher(nn.Module):
    """A momentum encoder that every forward moves half of the way to the student."""

    def __init__(self, write, kind="parameter"):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(False)
        if kind == "buffer":
            for name, p in list(self.teacher.named_parameters()):
                delattr(self.teacher, name)
                self.teacher.register_buffer(name, p.detach())
        self.write = write
        self.moves = True
        self.register_buffer("table", torch.zeros(100))

    def forward(self, x):
        if self.moves:
            with torch.no_grad():
                for name, p in self.student.named_parameters():
                    self.write(getattr(self.teacher, name), p)
        return nn.functional.mse_loss(self.student(x), self.teacher(x + 1))


def closure_of(model, x):
    def closure():
        loss = model(x)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("write", WRITES)
def test_a_teacher_moves_once_a_step_from_the_unperturbed_weights(write, kind):
    model, x = Teacher(WRITES[write], kind), torch.randn(8, 6)
    opt = FAD(sgd(model.student.parameters()), rho=0.5, model=model)
    for _ in range(3):
        student, teacher = model.student.weight.detach(), model.teacher.weight.detach()
        expected = teacher.lerp(student, 0.5)
        opt.step(closure_of(model, x))
        assert torch.equal(model.teacher.weight, expected)


@pytest.mark.parametrize("write", ["in place", "by a new .data"])
def test_a_teacher_that_starts_to_move_later_is_seen_at_once(write):
    model, x = Teacher(WRITES[write]), torch.randn(8, 6)
    opt = FAD(sgd(model.student.parameters()), rho=0.5, model=model)
    model.moves = False
    opt.step(closure_of(model, x))
    model.moves = True
    expected = model.teacher.weight.lerp(model.student.weight.detach(), 0.5)
    opt.step(closure_of(model, x))
    assert torch.equal(model.teacher.weight, expected)


def test_a_late_write_through_data_is_found_now_and_then():
    model, x = Teacher(WRITES["through .data"]), torch.randn(8, 6)
    opt = SAM(sgd(model.student.parameters(), lr=1e-6), model=model)
    model.moves = False
    for _ in range(CHECK_EVERY):
        opt.step(closure_of(model, x))
    model.moves = True
    expected = model.teacher.weight.lerp(model.student.weight.detach(), 0.5)
    with pytest.warns(UserWarning, match="teacher.*write through .data"):
        opt.step(closure_of(model, x))
    assert torch.equal(model.teacher.weight, expected)


@pytest.mark.parametrize("write", WRITES)
def test_a_teacher_that_begins_as_its_student_moves_once(write):
    """The first pass then writes what is there already, and contents show nothing."""
    model, x = Teacher(WRITES[write]), torch.randn(8, 6)
    model.teacher.load_state_dict(model.student.state_dict())
    opt = FAD(sgd(model.student.parameters()), rho=0.5, model=model)
    for _ in range(3):
        expected = model.teacher.weight.detach().lerp(model.student.weight.detach(), 0.5)
        opt.step(closure_of(model, x))
        assert torch.equal(model.teacher.weight, expected)


@pytest.mark.parametrize("write", WRITES)
def test_a_teacher_among_the_optimizers_parameters_is_state_while_it_is_frozen(write):
    """MoCo's own script gives the optimizer all parameters of the model."""
    model, x = Teacher(WRITES[write]), torch.randn(8, 6)
    opt = FAD(sgd(model.parameters()), rho=0.5, model=model)
    for _ in range(3):
        expected = model.teacher.weight.detach().lerp(model.student.weight.detach(), 0.5)
        opt.step(closure_of(model, x))
        assert torch.equal(model.teacher.weight, expected)


@pytest.mark.parametrize("first", ["fails", "has no gradient"])
def test_a_first_step_that_came_to_nothing_is_not_the_comparison(first):
    model, x = Teacher(WRITES["through .data"]), torch.randn(8, 6)
    opt = FAD(sgd(model.student.parameters()), rho=0.5, model=model)
    if first == "fails":
        with pytest.raises(RuntimeError, match="shape"):
            opt.step(closure_of(model, torch.randn(8, 7)))
    else:
        opt.step(lambda: None)
    expected = model.teacher.weight.detach().lerp(model.student.weight.detach(), 0.5)
    opt.step(closure_of(model, x))
    assert torch.equal(model.teacher.weight, expected)


def test_layers_and_buffers_that_come_later_are_kept_still():
    class Lazy(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "count"):
                self.register_buffer("count", torch.zeros(()))
            self.count += 1
            return super().forward(x)

    model = nn.Sequential(Lazy(3, 3), nn.Identity())
    opt = FAD(sgd(model.parameters()), model=model)

    def closure():
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert model[0].count == 1
    model[1] = nn.BatchNorm1d(3, affine=False)
    opt.step(closure)
    assert (model[0].count, model[1].num_batches_tracked) == (2, 1)


def test_batch_norm_that_starts_to_train_later_counts_once():
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.randn(8, 3)
    alone = copy.deepcopy(model)
    opt = FAD(sgd(model.parameters()), model=model)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    model.eval()
    opt.step(closure)
    assert model[0].num_batches_tracked == 0
    model.train()
    opt.step(closure)
    alone(x)
    for name, value in alone[0].named_buffers():
        assert torch.equal(value, model[0].get_buffer(name))


def test_what_only_a_later_pass_changes_is_told():
    class Late(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls % 2 == 0:
                self.count += 1
            return super().forward(x)

    model = Late(3, 1)
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("table", torch.zeros(300_000))  # too much to be kept for safety's sake
    opt = SAM(sgd(model.parameters()), model=model)

    def closure():
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="count changed in a later pass") as seen:
        opt.step(closure)
    assert seen[0].filename == __file__
    opt.step(closure)
    assert model.count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(()).expand(3),
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "expanded", "nested", "conjugate"],
)
@pytest.mark.parametrize("at_first", [True, False])
def test_what_is_no_plain_memory_is_let_alone(make, at_first):
    class Net(nn.Linear):
        def forward(self, x):
            self.odd = make()
            self.count += 1
            return super().forward(x)

    model = Net(3, 1)
    model.register_buffer("odd", make() if at_first else torch.ones(3))
    model.register_buffer("count", torch.zeros(()))
    opt = SAM(sgd(model.parameters()), model=model)

    def closure():
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert model.count == 3


def test_parameters_that_another_optimizer_takes_up_later_keep_their_gradients():
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    critic.requires_grad_(False)
    opt = FAD(sgd(generator.parameters()), rho=0.5, model=[generator, critic])
    x = torch.randn(8, 3)

    def closure():
        loss = critic(generator(x)).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    critic.requires_grad_(True)
    reference = copy.deepcopy((generator, critic))
    reference[1](reference[0](x)).square().mean().backward()
    opt.step(closure)
    assert torch.equal(critic.weight.grad, reference[1].weight.grad)


def test_a_discriminator_does_not_count_the_generators_passes():
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    other = sgd(critic.parameters())
    opt = FAD(sgd(generator.parameters()), rho=0.5, model=[generator, critic])
    x = torch.randn(8, 3)
    reference = copy.deepcopy((generator, critic))
    loss = reference[1](reference[0](x)).mean()
    loss.backward()

    def closure():
        loss = critic(generator(x)).mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert critic[0].num_batches_tracked == 1
    for p, q in zip(critic.parameters(), reference[1].parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # what the other optimizer steps along
    other.step()
    with pytest.raises(TypeError, match="model must be an nn.Module or several of them, got str"):
        opt.model = [generator, "critic"]


class Copied(TorchDispatchMode):
    """Counts the entries that clones and copies touch."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("clone", "copy_", "_foreach_copy_"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.entries += sum(t.numel() for t in tensors)
        return func(*args, **(kwargs or {}))


def test_constant_state_is_not_copied():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 100_000))
    model[1].requires_grad_(False)
    model.register_buffer("table", torch.zeros(300_000))
    opt = SAM(sgd(model[0].parameters()), model=model)

    def closure():
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        with Copied() as counted:
            opt.step(closure)
        assert counted.entries < 1000


def test_a_fingerprint_sees_any_one_change():
    base = torch.arange(600_000, dtype=torch.float32)
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        x = base.to(dtype)
        known = fingerprint(x)
        assert fingerprint(x.clone()) == known
        for i in (0, 3, 262_144, 599_999):
            changed = x.clone()
            changed[i] = changed[i] == 0
            assert fingerprint(changed) != known, (dtype, i)
        swapped = x.clone()
        swapped[[1, 4]] = x[[4, 1]]
        assert (fingerprint(swapped) == known) == torch.equal(swapped, x)
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0))
    odd = torch.zeros(12)[1:]  # not where 64 bits begin
    assert fingerprint(odd) != fingerprint(odd + torch.eye(11)[3])
    assert fingerprint(torch.zeros(10_000)) != fingerprint(torch.ones(10_000))
    signed = torch.randn(20_000, dtype=torch.float64)
    assert fingerprint(signed) != fingerprint(torch.cat([-signed[:1000], signed[1000:]]))
    assert fingerprint(torch.ones(2, dtype=torch.complex64)) != fingerprint(torch.ones(2) * 1j)


@pytest.mark.parametrize("order", [("model", "opt"), ("opt", "model")])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_pair_belongs_together(copier, order):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    pair = {"model": model, "opt": FAD(sgd(model.parameters()), model=model)}
    new = copier({key: pair[key] for key in order})
    assert new["opt"].model is new["model"] is not model
    assert new["opt"].parameters()[0] is new["model"][0].weight

    def closure():
        loss = new["model"](torch.randn(8, 3)).square().mean()
        loss.backward()
        return loss

    new["opt"].step(closure)
    assert new["model"][0].num_batches_tracked == 1
    assert model[0].num_batches_tracked == 0


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g)),
    "numpy": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "legacy numpy": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "random": (lambda: __import__("random").Random(0), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_the_users_own_are_replayed_if_named(kind):
    make, draw = GENERATORS[kind]
    model = nn.Linear(2, 1)

    def draws(**options):
        generator, seen = make(), []
        opt = FAD(
            sgd(model.parameters()), **{k: v(generator) for k, v in options.items()}, model=model
        )

        def closure():
            seen.append(float(draw(generator)))
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        opt.step(closure)
        return seen

    named = draws(generators=lambda g: [g])
    assert len(set(named[:4])) == len(set(named[4:])) == 1
    assert named[0] != named[4]
    assert len(set(draws())) == 8
    with pytest.raises(TypeError, match="generators takes torch.Generator.*got int"):
        FAD(sgd(model.parameters()), generators=[3])


@pytest.mark.parametrize(
    "make", [AdaHessian, lambda p, lr: GAMExact(torch.optim.SGD(p, lr=lr))], ids=["ada", "gam"]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivatives_of_attention(make, compiled):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    opt = make(model.parameters(), lr=0.01)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.randn(4, 5, 8)
    before = model.linear1.weight.detach().clone()

    def closure():
        loss = run(x).pow(3).mean()
        loss.backward(create_graph=True)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)
    assert not torch.equal(model.linear1.weight, before)


def test_a_parameter_that_takes_anothers_place_is_optimized_and_not_kept_still():
    """As when layers are unfrozen in turn."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(8, 3)
    opt = FAD(sgd(model[1].parameters()), rho=0.5, model=model)

    def closure_for(net):
        def closure():
            loss = net(x).square().mean()
            loss.backward()
            return loss

        return closure

    opt.step(closure_for(model))
    opt.param_groups[0]["params"][:] = list(model[0].parameters())
    alone = copy.deepcopy(model)
    opt.step(closure_for(model))
    FAD(sgd(alone[0].parameters()), rho=0.5, model=alone).step(closure_for(alone))
    assert torch.equal(model[0].weight, alone[0].weight)


@pytest.mark.parametrize("kind", ["frozen parameter", "buffer"])
def test_what_shares_memory_with_a_weight_moves_with_it(kind):
    """To put it back would undo the perturbation of the weight."""

    def weights(given):
        torch.manual_seed(0)
        model = nn.Module()
        model.a, model.c = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        alias = model.a.weight.data
        if kind == "buffer":
            del model.c.weight
            model.c.register_buffer("weight", alias)
        else:
            model.c.weight = nn.Parameter(alias, requires_grad=False)
        model.forward = lambda x: (model.a(x) + model.c(x)).square().mean()
        opt = FAD(sgd(model.a.parameters()), rho=0.5, model=model if given else None)
        for _ in range(3):
            opt.step(closure_of(model, torch.ones(4, 6)))
        return model.a.weight

    assert torch.equal(weights(given=True), weights(given=False))


class Counting(nn.Module):
    """Counts its forward passes in whatever way it is told."""

    def __init__(self, count, b):
        super().__init__()
        self.a, self.count = nn.Linear(3, 1), count
        self.register_buffer("b", b)

    def forward(self, x):
        with torch.no_grad():
            self.count(self)
        return self.a(x).square().mean()


def test_a_buffer_that_cannot_be_copied_to_is_put_back_where_it_is_replaced():
    model = Counting(lambda m: setattr(m, "b", m.b + 1), torch.zeros(1).expand(3))
    opt = FAD(sgd(model.a.parameters()), model=model)
    for step in range(1, 4):
        opt.step(closure_of(model, torch.randn(4, 3)))
        assert model.b[0] == step


@pytest.mark.parametrize(
    "b", [torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
)
def test_a_write_that_cannot_be_undone_is_reported(b):
    model = Counting(lambda m: m.b.mul_(2), b)
    opt = SAM(sgd(model.a.parameters()), model=model)
    with pytest.warns(UserWarning, match="b: passes write into a tensor that cannot be copied to"):
        opt.step(closure_of(model, torch.randn(4, 3)))


def test_a_buffer_that_replaces_another_later_is_kept():
    model, x = Counting(lambda m: None, torch.zeros(3)), torch.randn(4, 3)
    opt = FAD(sgd(model.a.parameters()), model=model)
    for _ in range(5):
        opt.step(closure_of(model, x))
    del model.b
    model.register_buffer("f", torch.zeros(()))
    model.g = nn.Parameter(torch.zeros(()), requires_grad=False)
    model.count = lambda m: (m.f.add_(1), m.g.add_(1))
    for _ in range(10):
        opt.step(closure_of(model, x))
    assert (model.f, model.g) == (10, 10)


@pytest.mark.parametrize("how", ["resize_", ".data"])
def test_a_buffer_that_grows_in_place_grows_once(how):
    def grow(model):
        if how == "resize_":
            model.b.resize_(len(model.b) + 1)
        else:
            model.b.data = torch.cat([model.b, model.b[:1]])

    model = Counting(grow, torch.zeros(2))
    opt = FAD(sgd(model.a.parameters()), model=model)
    for step in range(1, 4):
        opt.step(closure_of(model, torch.randn(4, 3)))
        assert len(model.b) == 2 + step
