"""Products, gradients and losses are the dense ones; nothing is mutated; graphs follow weights."""

import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.algorithms import algorithm_names, build_algorithm
from steppe.curvature import (
    CurvatureOperator,
    GaussNewtonOperator,
    HessianOperator,
    top_eigenvalues,
)
from steppe.curvature.float32 import full_float32, tf32
from steppe.errors import UserError
from tests.algorithms.oracles import SIZES, make_batches, make_network, move
from tests.curvature import nets
from tests.curvature.nets import (
    CASES,
    Case,
    assert_same,
    block,
    cross_entropy,
    curvlinops,
    dense_gradient,
    dense_hessian,
    identity,
)
from tests.training.axes import OPTIONS

OPERATORS = [HessianOperator, GaussNewtonOperator]


@pytest.mark.parametrize("make", CASES)
def test_products_are_those_of_the_dense_hessian(make: Callable[[], Case]) -> None:
    """Batches of unequal size against all data at once, in training mode against evaluation."""
    case = make()
    expected = dense_hessian(case)
    for columns in [(), (1,), (2,), (5,)]:
        v = block(case.size(), *columns)
        op = HessianOperator(*case.args())
        assert op.shape == (case.size(), case.size())
        assert_same(op @ v, expected @ v)
        assert (op.products, op.passes) == (columns[0] if columns else 1, 1)
    assert bool(expected.any()) == (make is not nets.linear_loss)


@pytest.mark.parametrize("make", CASES)
def test_gradient_and_loss_are_those_of_all_data(make: Callable[[], Case]) -> None:
    case = make()
    loss, gradient = dense_gradient(case)
    for operator in OPERATORS:
        op = operator(*case.args())
        found_loss, found = op.gradient()
        assert_same(found, gradient)
        assert found_loss == pytest.approx(loss, rel=1e-13)
        assert op.loss() == pytest.approx(loss, rel=1e-13)
        assert (op.products, op.passes) == (0, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # which torch's forward mode uses itself
@pytest.mark.parametrize("make", [nets.mlp, nets.conv, nets.tied])
def test_products_are_those_of_curvlinops(make: Callable[[], Case]) -> None:
    case = make()
    model = copy.deepcopy(case.model).eval()
    params = [p for p in model.parameters() if p.requires_grad]
    theirs = curvlinops().HessianLinearOperator(model, nn.CrossEntropyLoss(), params, case.batches)
    v = block(case.size(), 3)
    assert_same(HessianOperator(*case.args()) @ v, theirs @ v)


def test_part_of_the_parameters_is_a_block_of_the_matrix() -> None:
    case = nets.conv()
    whole = HessianOperator(*case.args())
    rows = slice(3 * 2 * 9 + 3, 3 * 2 * 9 + 9)  # after the convolution: batch norm
    part = HessianOperator(case.model, case.loss_fn, case.batches, case.model[1].parameters())
    assert_same(part @ identity(part), (whole @ identity(whole))[rows, rows])


def test_a_loader_and_one_batch_give_what_a_list_does() -> None:
    case = nets.mlp()
    v = block(case.size(), 2)
    expected = HessianOperator(*case.args()) @ v
    loader = DataLoader(TensorDataset(*case.whole), batch_size=4)
    for batches in ([case.whole], loader):
        assert_same(HessianOperator(case.model, case.loss_fn, batches) @ v, expected)


@pytest.mark.parametrize("make", [nets.mlp, nets.conv, nets.transformer])
def test_float32_is_as_exact_as_its_rounding(make: Callable[[], Case]) -> None:
    """Some fifty roundings of 6e-8 each, relative to the largest number of the product."""
    case = make()
    v = block(case.size(), 2)
    expected = HessianOperator(*case.args()) @ v
    op = HessianOperator(
        case.model.float(), case.loss_fn, [(x.float(), y) for x, y in case.batches]
    )
    found = op @ v.float()
    assert found.dtype == torch.float32
    assert_same(found.double(), expected, rtol=3e-6)


def test_what_the_result_looks_like() -> None:
    case = nets.mlp()
    op = HessianOperator(*case.args())
    v = block(case.size(), 3).requires_grad_()
    found = op @ v
    assert not found.requires_grad
    assert_same(op @ v.detach().T.contiguous().T, found)  # a block with strides
    assert (op @ v[:, :0]).shape == (case.size(), 0)
    assert repr(op) == "HessianOperator(43 x 43, torch.float64, cpu)"


# What a loss does not differentiate, weights of domains for instance, comes from the first pass.
DETACHED = {"GroupDRO", "RSC", "SelfReg", "EISNet"}
NEED_STAGES = {"ARM", "MixStyle", "MIRO", "pAdaIN", "DSON"}  # or convolutions or batch norms
# Losses that contain gradients as constants, or whose gradient is not their derivative.
NO_SECOND = {"MLDG", "MASF", "Fish", "ANDMask", "SANDMask", "DMG", "TRM"}


@pytest.mark.parametrize("name", sorted({*algorithm_names()} - NEED_STAGES - NO_SECOND))
def test_losses_of_algorithms(name: str) -> None:
    """Against finite differences of the gradient, whose error falls with the square of the step.

    At 1e-5, that of RDM's narrow kernels is 6e-6; at 1e-6, rounding still costs others only 1e-9.
    The algorithm is in the middle of its training: penalties are on, and its buffers filled.
    """
    torch.manual_seed(0)
    options = OPTIONS.get(name, {})
    algorithm = build_algorithm(name, make_network(dropout=0.3), len(SIZES), **options)
    algorithm.double().train()
    for seed in range(4):
        prepared = algorithm.prepare(make_batches(seed=seed))
        algorithm.commit(
            prepared, {o.name: algorithm(prepared, o.name) for o in algorithm.objectives()}
        )
        move(algorithm, seed)
    prepared = algorithm.prepare(make_batches(seed=9))
    algorithm.eval()
    first = algorithm(prepared).aux if name in DETACHED else None

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[1], first=first).total

    op = HessianOperator(algorithm.train(), loss_fn, [(prepared.images, prepared)])
    at = HessianOperator(algorithm, loss_fn, op.batches, keep_graphs=False)
    v, step = block(op.shape[0]), 1e-6
    found = op @ v
    sides = []
    for sign in (1, -2, 1):  # there, to the other side, back
        with torch.no_grad():
            for p, part in zip(op.params, op.unflatten(v), strict=True):
                p.add_(part, alpha=sign * step)
        sides.append(at.gradient()[1])
    assert_same(found, (sides[0] - sides[1]) / (2 * step), rtol=1e-6)


def test_the_inner_step_of_mldg_is_a_constant() -> None:
    """Its loss detaches it; so H = H_i(theta) + beta H_j(theta - inner_lr * g_i), over domains."""
    network = make_network()
    algorithm = build_algorithm("MLDG", network, len(SIZES), beta=0.7, inner_lr=0.5)
    prepared = algorithm.prepare(make_batches())
    op = HessianOperator(algorithm, lambda m, b: m(b[1]).total, [(prepared.images, prepared)])
    images, labels = prepared.split(prepared.images), prepared.split(prepared.labels)
    theta = {name: p.detach() for name, p in network.named_parameters()}

    def risk(point: dict[str, Tensor], i: int) -> Tensor:
        return F.cross_entropy(functional_call(network, point, (images[i],)), labels[i])

    expected = torch.zeros(op.shape, dtype=torch.float64)
    for i, j in prepared.draws["pairs"]:
        inner = torch.func.grad(risk)(theta, i)
        moved = {name: theta[name] - 0.5 * inner[name] for name in theta}
        for weight, point, domain in ((1.0, theta, i), (0.7, moved, j)):
            blocks = torch.func.jacrev(torch.func.grad(risk))(point, domain)
            rows = [
                torch.cat([blocks[a][b].reshape(theta[a].numel(), -1) for b in theta], 1)
                for a in theta
            ]
            expected += weight / len(SIZES) * torch.cat(rows)
    assert_same(op @ identity(op), expected)


def state(model: nn.Module) -> list[object]:
    """Everything that must be as it was, comparable with ==."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [module.training for module in model.modules()],
        [(name, id(t), t._version, t.requires_grad, id(t.grad)) for name, t in tensors],
        [t.detach().clone().view(torch.uint8).tolist() for _, t in tensors if t.ndim],
        [len(module._forward_hooks) for module in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch._dynamo.eval_frame._stance.stance,
    ]


def mixed_modes() -> tuple[nn.Module, DataLoader[Any]]:
    """Modules in both modes, one of them frozen, gradients here and there."""
    case = nets.conv()
    model = case.model.train()
    model[1].eval()
    model[5].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return model, DataLoader(TensorDataset(*case.whole), batch_size=4)


def broken(model: nn.Module, batch: Any) -> Tensor:
    """Leaves the modes in disorder."""
    model(batch[0])
    model.train(not model.training)
    raise ZeroDivisionError


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * torch.rand(())


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("use", ["product", "gradient", "loss"])
@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [(cross_entropy, None), (broken, ZeroDivisionError), (noisy, UserError)],
)
def test_nothing_is_mutated(
    operator: type[CurvatureOperator],
    use: str,
    loss_fn: Callable[..., Tensor],
    error: type[Exception] | None,
) -> None:
    model, loader = mixed_modes()
    op = operator(model, loss_fn, loader, list(model.parameters()))
    torch.compiler.set_stance("default")  # torch._dynamo is there to be looked at
    uses = {
        "product": lambda: op @ block(op.shape[0]),
        "gradient": op.gradient,
        "loss": op.loss,
    }
    before = state(model)
    fails = error is not None and not (loss_fn is noisy and use == "loss")
    with pytest.raises(error) if fails else contextlib.nullcontext():
        uses[use]()
    assert state(model) == before


@contextlib.contextmanager
def new_switches() -> Iterator[None]:
    """TF32 asked for by the newer of torch's two ways; the older cannot be read meanwhile."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        new_switches,
    ],
)
def test_the_surroundings_do_not_matter(
    operator: type[CurvatureOperator], context: Callable[[], Any]
) -> None:
    case = nets.conv()
    model, batches = case.model.float(), [(x.float(), y) for x, y in case.batches]
    v = block(case.size(), 2, dtype=torch.float32)

    def results(v: Tensor) -> list[Any]:
        op = operator(model, cross_entropy, batches)
        return [op @ v, *op.gradient(), op.loss()]

    expected = results(v)
    with context():
        found = results(v.clone())
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_compiled_model(operator: type[CurvatureOperator]) -> None:
    """aot_eager refuses to be differentiated twice: what the operator sees is not compiled."""
    case = nets.mlp()
    v = block(case.size(), 2)
    expected = operator(*case.args()) @ v
    compiled = torch.compile(case.model, backend="aot_eager")
    compiled(case.whole[0]).sum().backward()
    assert torch.equal(operator(compiled, case.loss_fn, case.batches) @ v, expected)


class Counting(list[Any]):
    """Batches that count how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.reads += 1
            yield batch


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("keep_graphs", "single", "kept"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_kept_graphs_save_passes_and_change_nothing(
    operator: type[CurvatureOperator], keep_graphs: bool | None, single: bool, kept: bool
) -> None:
    case = nets.conv()
    batches = Counting([case.whole] if single else case.batches)
    reported: list[int] = []
    op = operator(
        case.model,
        case.loss_fn,
        batches,
        keep_graphs=keep_graphs,
        check=False,
        progress=reported.append,
    )
    v = block(case.size(), 2)
    first, second = op @ v, op @ v
    _, gradient = op.gradient()
    assert torch.equal(first, second)
    assert_same(gradient, dense_gradient(case)[1])
    assert torch.equal(op @ v, first)  # the gradient leaves the graph as it was
    passes = 1 if kept else 4
    numbers = list(range(1, len(batches) + 1))
    assert (op.products, op.passes, batches.reads) == (6, passes, passes * len(batches))
    assert reported == numbers * passes
    op.loss()
    assert (op.passes, reported) == (passes + 1, numbers * (passes + 1))


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def behind_the_back(model: nn.Module) -> None:
    model[0].weight.data.mul_(1.5)


def replaced(model: nn.Module) -> None:
    for _ in range(2):  # the second may well get the memory of the first
        model[0].weight.data = model[0].weight.data * 1.5


def buffer(model: nn.Module) -> None:
    model[1].running_var.mul_(2)


def outside(model: nn.Module) -> None:
    """A parameter that the operator does not differentiate by."""
    with torch.no_grad():
        model[5].bias.add_(torch.tensor([1.0, 0.0, -1.0]))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("change", [in_place, behind_the_back, replaced, buffer, outside])
def test_a_kept_graph_is_that_of_the_present_weights(
    operator: type[CurvatureOperator], change: Callable[[nn.Module], None]
) -> None:
    case = nets.conv()
    params = [p for name, p in case.model.named_parameters() if name != "5.bias"]
    op = operator(case.model, case.loss_fn, [case.whole], params)
    v = block(op.shape[0])
    before = op @ v
    change(case.model)
    expected = operator(case.model, case.loss_fn, [case.whole], params) @ v
    assert (expected - before).abs().max() > 1e-3 * before.abs().max()
    assert torch.equal(op @ v, expected)
    assert op.passes == 2
    assert torch.equal(op @ v, expected)
    assert op.passes == 2


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("use", ["product", "gradient"])
@pytest.mark.parametrize("keep_graphs", [False, True])
def test_a_graph_is_freed_before_the_next_batch(
    operator: type[CurvatureOperator], use: str, keep_graphs: bool
) -> None:
    """Without the help of the garbage collector, which may come late."""
    case = nets.mlp()
    hidden: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in hidden))
        output = model[1](model[0](batch[0]))  # which tanh saves
        hidden.append(weakref.ref(output))
        return F.cross_entropy(head(output), batch[1])

    head = case.model[2]
    options = {} if operator is HessianOperator else {"outputs": head}
    op = operator(
        case.model, loss_fn, case.batches, keep_graphs=keep_graphs, check=False, **options
    )
    gc.disable()
    try:
        op.gradient() if use == "gradient" else op @ block(case.size())
    finally:
        gc.enable()
    assert alive == ([0, 1, 2] if keep_graphs else [0, 0, 0])
    assert sum(ref() is not None for ref in hidden) == (3 if keep_graphs else 0)


class Numbered(nn.Module):
    """Its dtype and parameters are what a test asks for."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=dtype) for dtype in dtypes)


LINEAR = nn.Linear(3, 2)
X = torch.ones(4, 3)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": []}, "batches is empty"),
        ({"batches": DataLoader(TensorDataset(X[:0]))}, "batches is empty"),
        ({"batches": [X[:0]]}, "batch 0 is nan"),
        ({"batches": X}, "batches is a single tensor: put it in a list"),
        ({"batches": iter([X])}, "list_iterator, which can be read only once"),
        ({"batches": (x for x in [X])}, "generator, which can be read only once"),
        ({"batches": ["text"]}, "a batch must be a tensor, or .* got str"),
        ({"batches": [{"size": 3, "parts": [None]}]}, "a batch must be a tensor, or .* got dict"),
        ({"batches": [torch.tensor(1.0)]}, "a batch must be a tensor"),
        ({"loss_fn": lambda m, x: m(x).square().mean(1)}, r"one number, got \(4,\)"),
        ({"loss_fn": lambda m, x: 1.5}, "one number, got float"),
        ({"loss_fn": lambda m, x: m(x).mean() * float("nan")}, "the loss of batch 0 is nan"),
        (
            {"batches": [X, X * 1e30]},
            "the loss of batch 1 is inf, .* finite loss. Check",
        ),
        (
            {"loss_fn": lambda m, x: squares(m, x) + (m.bias * 0).sum().sqrt()},
            "gradient with respect to bias is not finite, although",
        ),
        ({"loss_fn": lambda m, x: m(x).detach().mean()}, "does not depend on the parameters"),
        ({"params": []}, "params is empty"),
        ({"params": LINEAR.weight}, "params is one tensor: put it in a list"),
        ({"params": [LINEAR.weight, LINEAR.weight]}, "params contains a parameter twice"),
        ({"params": ["weight"]}, "params contains a str"),
        ({"params": LINEAR.named_parameters()}, "params contains a tuple"),
        ({"params": [LINEAR.weight * 2]}, "the model's own parameters, not results"),
        ({"params": [nn.Linear(3, 2).weight]}, "does not depend on the parameters"),
        (
            {"model": nn.Linear(3, 2).half()},
            r"torch.float16, which is too coarse .* model.float\(\)",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    """What is wrong is found when the operator is made, or at the latest by the first product."""
    with pytest.raises(UserError, match=message):
        op = HessianOperator(**{"model": LINEAR, "loss_fn": squares, "batches": [X], **changes})
        op @ torch.zeros(op.shape[0])


def test_bad_parameters() -> None:
    mixed = Numbered(torch.float32, torch.float64)
    with pytest.raises(UserError, match="torch.float32 on cpu, torch.float64 on cpu. Convert"):
        HessianOperator(mixed, squares, [X])
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        HessianOperator(nn.Linear(3, 2).requires_grad_(False), squares, [X])
    # One of a type is enough.
    layer = mixed.layers[0]
    op = HessianOperator(mixed, lambda m, x: squares(layer, x), [X], layer.parameters())
    assert op.shape == (8, 8)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (torch.zeros(7), r"has 8 rows, .* \(8, b\), got \(7,\)"),
        (torch.zeros(2, 8), r"got \(2, 8\)"),
        (torch.zeros(8, 1, 1), r"got \(8, 1, 1\)"),
        (
            torch.zeros(8).double(),
            r"float32 on cpu, but the vector is torch.float64 on cpu.*\.to\(",
        ),
        (torch.zeros(8, device="meta"), "the vector is torch.float32 on meta"),
    ],
)
def test_bad_vectors(vector: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HessianOperator(LINEAR, squares, [X]) @ vector


def test_an_empty_parameter_is_no_trouble() -> None:
    case = nets.mlp()
    case.model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + model.empty.sum()

    v = block(case.size())
    expected = HessianOperator(*nets.mlp().args()) @ v
    assert torch.equal(HessianOperator(case.model, loss_fn, case.batches) @ v, expected)


def test_tf32_is_off_on_the_device_and_the_switches_stay(device: torch.device) -> None:
    """Its products are wrong in the third digit, those of full fp32 in the sixth."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 36, 64)
    ).to(device)
    batches = [(torch.randn(32, 8, 8, 8).to(device), torch.randint(64, (32,)).to(device))]
    v = torch.randn(sum(p.numel() for p in model.parameters())).to(device)
    exact_batches = [(x.double(), y) for x, y in batches]
    expected = (
        HessianOperator(copy.deepcopy(model).double(), cross_entropy, exact_batches) @ v.double()
    )
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    matmul, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    generators = torch.cuda if device.type == "cuda" else torch
    rng = generators.get_rng_state()
    try:
        for older in (True, False):
            if older:
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            for switch in switches:
                switch.fp32_precision = "tf32"
            for operator in (HessianOperator, GaussNewtonOperator):
                found = operator(model, cross_entropy, batches) @ v
                if operator is HessianOperator:
                    assert_same(found.double(), expected, rtol=1e-5)
            assert [switch.fp32_precision for switch in switches] == ["tf32", "tf32"]
    finally:
        # The older switches too, and first: where the two ways disagree, none can be read.
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = convolutions
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
    assert torch.equal(generators.get_rng_state(), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("batches", [1, 2])
def test_tf32_products_are_coarse_and_only_when_asked_for(batches: int) -> None:
    """The same operator gives both, whichever comes first, from one kept graph or anew."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Conv2d(16, 32, 1), nn.Flatten(),
        nn.Linear(32 * 36, 64),
    ).cuda().eval()  # fmt: skip
    data = [
        (torch.randn(32, 8, 8, 8).cuda(), torch.randint(64, (32,)).cuda()) for _ in range(batches)
    ]
    v = torch.randn(sum(p.numel() for p in model.parameters())).cuda()
    exact_data = [(x.double(), y) for x, y in data]
    expected = (
        HessianOperator(copy.deepcopy(model).double(), cross_entropy, exact_data) @ v.double()
    )
    op = HessianOperator(model, cross_entropy, data)
    coarse = op.tf32
    assert (coarse.shape, coarse.dtype, coarse.device) == (op.shape, op.dtype, op.device)
    for _ in range(2):
        found = coarse @ v
        assert_same(found.double(), expected, rtol=2e-2)
        assert (found - expected).norm() > 1e-5 * expected.norm()
        assert_same((op @ v).double(), expected, rtol=1e-5)
    assert op.products == 4
    with pytest.raises(UserError, match="vectors of shape"):
        coarse @ v[1:]
    assert_same((op @ v).double(), expected, rtol=1e-5)


@pytest.mark.gpu
def test_tf32_eigenvalues_are_those_of_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    data = [(torch.randn(64, 3, 8, 8).cuda(), torch.randint(10, (64,)).cuda())]
    op = HessianOperator(model.cuda(), cross_entropy, data)
    exact = top_eigenvalues(op, 10)
    before = op.products
    found = top_eigenvalues(op, 10, precision="tf32", vectors=True)
    assert found.converged
    assert found.products == op.products - before
    scale = float(exact.values.max())
    torch.testing.assert_close(found.values, exact.values, rtol=0, atol=2e-3 * scale)
    v = found.vectors
    true = torch.linalg.vector_norm(op @ v - v * found.values.to(v), dim=0).cpu().double()
    assert true.max() <= 1e-3 * scale * 1.01
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=2e-5 * scale)


def test_tf32_needs_float32_on_a_gpu() -> None:
    op = HessianOperator(LINEAR, squares, [X])
    with pytest.raises(UserError, match=r"precision=tf32 needs .* on a GPU, .* on cpu: use fp32"):
        top_eigenvalues(op, 1, precision="tf32")


@pytest.mark.parametrize("context", [full_float32, tf32])
def test_an_error_leaves_the_switches_as_they_were(context: Callable[..., Any]) -> None:
    """They exist without a GPU, too."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    with pytest.raises(ZeroDivisionError), context(torch.device("cuda")):
        inside = [switch.fp32_precision for switch in switches]
        raise ZeroDivisionError
    assert inside == ["tf32" if context is tf32 else "ieee"] * 3
    assert [switch.fp32_precision for switch in switches] == before


def test_weights_that_are_written_with_equal_values_are_no_trouble():
    # Autograd refuses the kept graph then, although nothing has changed.
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    op = HessianOperator(model, lambda model, x: model(x).square().mean(), [x])
    vector = torch.randn(op.shape[0])
    before = op @ vector
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert torch.equal(op @ vector, before)


def test_second_derivatives_that_are_not_symmetric_are_refused():
    # torch's own second derivative of weight norm is wrong, and fails its gradgradcheck.
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    op = HessianOperator(model, lambda model, x: model(x).square().mean(), [x])
    with pytest.raises(UserError, match="not symmetric.*weight_norm"):
        op @ torch.randn(op.shape[0])


def test_sparse_gradients_are_refused():
    table, rows = nn.Embedding(6, 2, sparse=True), torch.tensor([1, 4])
    op = HessianOperator(table, lambda table, rows: table(rows).square().sum(), [rows])
    with pytest.raises(UserError, match="to weight is sparse: build the layer with sparse=False"):
        op @ torch.randn(op.shape[0])


def criterion_case() -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4).double(), torch.randint(3, (9,))
    return model, list(zip(x.split(4), y.split(4), strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_criterion_is_taken_with_pairs_of_inputs_and_targets(operator, criterion) -> None:
    model, pairs = criterion_case()
    op = operator(model, criterion, pairs)
    by_hand = operator(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), pairs)
    v = block(op.shape[0])
    assert torch.equal(op @ v, by_hand @ v)
    assert op.loss() == by_hand.loss()


def test_a_module_that_takes_the_model_is_called_as_before() -> None:
    class Penalized(nn.Module):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1]) + model[0].weight.square().sum()

    model, pairs = criterion_case()
    plain = HessianOperator(model, nn.CrossEntropyLoss(), pairs).loss()
    expected = plain + model[0].weight.detach().square().sum().item()
    assert HessianOperator(model, Penalized(), pairs).loss() == pytest.approx(expected)


def test_criteria_and_batches_that_do_not_fit_are_refused() -> None:
    model, pairs = criterion_case()
    with pytest.raises(UserError, match="CrossEntropyLoss has reduction='sum'"):
        HessianOperator(model, nn.CrossEntropyLoss(reduction="sum"), pairs)
    for batch, got in ((pairs[0][0], "Tensor"), ((*pairs[0], 1), "3 values")):
        with pytest.raises(UserError, match=rf"batches of \(inputs, targets\), got {got}"):
            HessianOperator(model, nn.CrossEntropyLoss(), [batch]).loss()
