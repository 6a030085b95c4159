"""Matrices of second derivatives of the mean loss, known only through products with vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError
from steppe.optim.graph import twice_differentiable

from .convolution import FastConvolutions
from .determinism import check_buffers, check_repeatable, same
from .float32 import full_float32, tf32
from .inputs import batch_size, chosen_params, mean_loss
from .symmetric import Symmetric

LossFunction = Callable[[nn.Module, Any], Tensor] | Callable[[Tensor, Tensor], Tensor]
"""Maps a model and a batch, or outputs and targets, to the mean loss of the batch."""

Parts = Sequence[Tensor | None]
"""A vector in parts, one per parameter; None if the loss does not use the parameter."""

Product = Callable[[Sequence[Tensor]], Parts]
"""Multiplies one batch's matrix by a vector. Vector and product have one part per parameter."""


_State = tuple[list[int], list[Tensor]]


@dataclass(frozen=True)
class Differentiated:
    """The mean loss of a batch, with functions that compute its gradient and products."""

    loss: Tensor
    gradient: Callable[[], Parts]
    product: Product


class CurvatureOperator(ABC):
    """Base class of the operators, which compute second derivatives of the mean loss.

    `operator @ v` takes a flat vector of length `n`, or `n x b` for a block of `b` vectors. It
    makes one pass over the data: per batch, a forward pass, a first backward pass, and one more
    backward pass per vector. Products use the current weights. During a product, the model runs in
    evaluation mode, in full fp32 (no autocast; TF32 only in products of `tf32`) and uncompiled.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)` returns the mean loss of a batch, a scalar. If batches are
            `(inputs, targets)`, it may be a criterion: `nn.CrossEntropyLoss()`, `F.mse_loss`.
        batches: an iterable that always yields the same batches: a list, or a loader that does not
            shuffle or augment. A batch is a tensor, or a tuple, list or mapping. The length of its
            first tensor is its weight in the mean.
        params: the parameters to differentiate with respect to, such as one layer's (default: the
            model's parameters that require a gradient).
        keep_graphs: whether to keep the graphs of all batches in memory, which saves the forward
            and first backward passes of later products (default: only if there is one batch, when
            it costs no extra memory). Graphs are renewed when weights or buffers change. Pass False
            if the loss depends on anything else besides the batch.
        check: whether to check, before the first product, that the loss is repeatable and its
            matrix symmetric.
        progress: called after each batch of a pass with its number, from 1.

    Attributes:
        products: number of vectors multiplied.
        passes: number of passes over the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        params: Iterable[Tensor] | None = None,
        *,
        keep_graphs: bool | None = None,
        check: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if isinstance(batches, Tensor):
            raise UserError("batches is a single tensor: put it in a list")
        if isinstance(batches, Iterator):
            raise UserError(
                f"batches is a {type(batches).__name__}, which can be read only once: pass a list "
                "or a loader"
            )
        self.model, self.loss_fn, self.batches = model, mean_loss(loss_fn), batches
        self.params = chosen_params(model, params)
        self.products = self.passes = 0
        self._shapes = [p.shape for p in self.params]
        self._lengths = [p.numel() for p in self.params]
        self._progress = progress
        self._checked = not check
        self._keep = keep_graphs
        self._kept: list[tuple[int, Differentiated]] = []
        self._kept_for: _State = ([], [])
        self._samples: int | None = None
        self._precision = full_float32

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, with `n` the number of parameters."""
        n = sum(self._lengths)
        return n, n

    @property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def __repr__(self) -> str:
        n = self.shape[0]
        return f"{type(self).__name__}({n} x {n}, {self.dtype}, {self.device})"

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply by a vector, or by each column of a matrix."""
        self._check_vectors(vectors)
        samples = 0
        with self._still():
            rows = vectors.detach().reshape(self.shape[0], -1).T
            out = torch.zeros(rows.shape, dtype=self.dtype, device=self.device)
            tangents = [self.unflatten(row) for row in rows]
            sums = [self.unflatten(row) for row in out]  # views: adding to them fills `out`
            for n, batch in self._batches():
                for tangent, total in zip(tangents, sums, strict=True):
                    # The graph itself is always in full fp32: TF32 would flip rectifiers.
                    with self._precision(self.device):
                        product = batch.product(tangent)
                    _add(total, product, n)
                samples += n
                del batch  # frees its memory before the next one
            self.products += len(rows)
            return out.div_(samples).T.reshape(vectors.shape)

    @property
    def tf32(self) -> Symmetric:
        """The same matrix with products in TF32, which are faster on GPUs and less exact.

        Their relative error is about 0.001 (ResNet-50). The forward and first backward passes stay
        in full fp32, so the gain is larger with kept graphs. `top_eigenvalues` with
        `precision="tf32"` corrects the error.
        """
        if self.device.type != "cuda" or self.dtype != torch.float32:
            raise UserError(
                f"precision=tf32 needs float32 parameters on a GPU, and these are {self.dtype} on "
                f"{self.device}: use fp32"
            )
        return _InTF32(self)

    def gradient(self) -> tuple[float, Tensor]:
        """The mean loss and its gradient, as a flat vector."""
        loss, samples = 0.0, 0
        with self._still():
            out = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            total = self.unflatten(out)
            for n, batch in self._batches(twice=False):
                _add(total, batch.gradient(), n)
                loss += float(batch.loss) * n
                samples += n
                del batch
            return loss / samples, out.div_(samples)

    def loss(self) -> float:
        """The mean loss."""
        total, samples = 0.0, 0
        with self._still(), torch.no_grad():
            for number, batch in enumerate(self._read()):
                n = batch_size(batch)
                total += float(self._loss(batch, number)) * n
                samples += n
                self._report(number)
        return total / samples

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """Views of a flat vector in the shapes of the parameters."""
        pieces = vector.split(self._lengths)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    @abstractmethod
    def _differentiate(self, batch: Any, number: int) -> Differentiated:
        """Evaluate a batch so that it can be differentiated twice."""

    def _batches(self, twice: bool = True) -> Iterator[tuple[int, Differentiated]]:
        """Each batch with its size; `twice` prepares products besides the gradient."""
        if not self._checked:
            self._probe()
            self._checked = True
        if self._kept and same(self._kept_for, self._state()):
            yield from self._kept
            return
        self._kept = []
        kept, keep = [], self._keep
        for number, (batch, is_last) in enumerate(_until_last(self._read())):
            if keep is None:
                keep = is_last  # there is only one batch
            one = self._differentiate(batch, number) if twice or keep else self._once(batch, number)
            if keep:
                kept.append((batch_size(batch), one))
            yield batch_size(batch), one
            del one
            self._report(number)
        if kept:
            self._kept, self._kept_for = kept, self._state()

    def _report(self, number: int) -> None:
        if self._progress is not None:
            self._progress(number + 1)

    def _once(self, batch: Any, number: int) -> Differentiated:
        loss = self._loss(batch, number)
        return Differentiated(loss.detach(), lambda: gradient_parts(loss, self.params), _no_product)

    def _loss(self, batch: Any, number: int) -> Tensor:
        with FastConvolutions():
            loss: object = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"loss_fn must return the mean loss of a batch, a tensor with one number, got {got}"
            )
        if not torch.isfinite(loss.detach()):
            raise UserError(
                f"the loss of batch {number} is {float(loss.detach())}, but curvature needs a "
                "finite loss. Check the weights and the data."
            )
        return loss.reshape(())

    def _read(self) -> Iterator[Any]:
        samples = 0
        for batch in self.batches:
            samples += batch_size(batch)
            yield batch
        if not samples:
            raise UserError("batches is empty: curvature needs at least one sample")
        if self._samples not in (None, samples):
            raise UserError(
                f"batches yielded {self._samples} samples in one pass and {samples} in another: "
                "every pass must yield the same samples"
            )
        self._samples = samples
        self.passes += 1

    def _state(self) -> _State:
        """The versions of all tensors that the loss depends on, and copies of their values.

        Versions miss writes such as `p.data.mul_()`, and values are not enough: autograd rejects a
        graph whose tensors were overwritten, even with equal values. One concatenated copy per type
        needs a few kernel launches instead of hundreds.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.params]
        once = list(dict.fromkeys(tensors))
        for tensor in once:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().reshape(-1))
        # Tensors created in inference mode have no versions.
        versions = [0 if tensor.is_inference() else tensor._version for tensor in once]
        return versions, [torch.cat(parts) for parts in kinds.values()]

    def _probe(self) -> None:
        """Check that batches, model and loss are deterministic, and the matrix symmetric."""
        first = next(self._read())

        def evaluate() -> tuple[Tensor, Parts]:
            loss = self._loss(first, 0)
            return loss.detach(), gradient_parts(loss, self.params)

        with check_buffers(self.model):
            loss, gradient = evaluate()
        if not any(part is not None for part in gradient):
            raise UserError(
                "the loss does not depend on the parameters: it may be detached, computed under "
                "no_grad, or computed from another model"
            )
        self._check_gradient(gradient)
        check_repeatable(
            self.model,
            lambda: self._loss(first, 0),
            before=(loss, gradient),
            after=evaluate(),
            batches=(first, next(iter(self.batches), None)),
        )
        self._check_symmetry(self._differentiate(first, 0).product)

    def _check_symmetry(self, product: Product) -> None:
        """Compare u' H v with v' H u, relative to the norm of H v."""
        generator = torch.Generator(self.device).manual_seed(0)
        n = self.shape[0]
        flat = torch.randn(2, n, generator=generator, dtype=self.dtype, device=self.device)
        images = torch.zeros_like(flat)
        for vector, image in zip(flat, images, strict=True):
            _add(self.unflatten(image), product(self.unflatten(vector)), 1)
        difference = flat[0] @ images[1] - flat[1] @ images[0]
        scale = torch.linalg.vector_norm(images, dim=1).max()
        if difference.abs() > torch.finfo(self.dtype).eps ** 0.4 * scale:
            raise UserError(
                "the second derivatives of the loss are not symmetric: some layer's backward pass "
                "is not the derivative of its forward pass (gradient reversal) or has a wrong "
                "derivative itself (torch's weight_norm)"
            )

    def _check_gradient(self, gradient: Parts) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        for i, (p, part) in enumerate(zip(self.params, gradient, strict=True)):
            if part is not None and part.layout is not torch.strided:
                raise UserError(
                    f"the gradient with respect to {names.get(id(p), f'params[{i}]')} is sparse: "
                    "build the layer with sparse=False"
                )
            if part is not None and not part.isfinite().all():
                raise UserError(
                    f"the gradient with respect to {names.get(id(p), f'params[{i}]')} is not "
                    "finite, although the loss is. Curvature needs a smooth loss."
                )

    def _check_vectors(self, vectors: Tensor) -> None:
        n = self.shape[0]
        if vectors.ndim not in (1, 2) or vectors.shape[0] != n:
            raise UserError(
                f"the operator has {n} rows, so it multiplies vectors of shape ({n},) or ({n}, b), "
                f"got {tuple(vectors.shape)}"
            )
        if vectors.dtype != self.dtype or vectors.device != self.device:
            raise UserError(
                f"the parameters are {self.dtype} on {self.device}, but the vector is "
                f"{vectors.dtype} on {vectors.device}: convert it with .to()"
            )

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Set up the model and torch for a product, and restore them afterwards."""
        # Not eval(), on which some modules merge weights.
        training = [(module, module.training) for module in self.model.modules()]
        frozen = [p for p in self.params if not p.requires_grad]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            # Iterating over a loader draws a seed for its workers.
            cuda = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(cuda, device_type="cuda"))
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(twice_differentiable())
            stack.enter_context(full_float32(self.device))
            try:
                for module, _ in training:
                    module.training = False
                for p in frozen:
                    p.requires_grad_(True)
                yield
            finally:
                for module, mode in training:
                    module.training = mode
                for p in frozen:
                    p.requires_grad_(False)


@dataclass(frozen=True)
class _InTF32:
    """An operator whose products are in TF32."""

    op: CurvatureOperator

    @property
    def shape(self) -> tuple[int, int]:
        return self.op.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.op.dtype

    @property
    def device(self) -> torch.device:
        return self.op.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.op._precision = tf32
        try:
            return self.op @ vectors
        finally:
            self.op._precision = full_float32


def gradient_parts(loss: Tensor, params: Sequence[Tensor], keep: bool = False) -> Parts:
    """The gradient of a loss; `keep` retains its graph."""
    if not loss.requires_grad:
        return [None] * len(params)
    parts: Parts = torch.autograd.grad(loss, params, retain_graph=keep, allow_unused=True)
    return parts


def _until_last(values: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """The values, each with whether it is the last."""
    held = next(values)  # an empty pass already raised an error
    for following in values:
        yield held, False
        held = following
    yield held, True


def _add(total: Sequence[Tensor], parts: Parts, weight: int) -> None:
    """Add the parts that exist, times `weight`."""
    found = [(t, p.detach()) for t, p in zip(total, parts, strict=True) if p is not None]
    if found:
        torch._foreach_add_([t for t, _ in found], [p for _, p in found], alpha=weight)


def _no_product(tangent: Sequence[Tensor]) -> Parts:
    raise AssertionError("this batch was differentiated only once")
