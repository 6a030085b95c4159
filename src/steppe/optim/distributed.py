"""What the engine needs to know about other processes: data-parallel and sharded training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 32 * 2**20
"""Approximate size of the flat buckets in which gradients are averaged."""


def _reducing(models: Iterable[nn.Module | None]) -> list[DistributedDataParallel]:
    """The models that all-reduce their gradients: DDP, or anything with `no_sync`."""
    return [cast(DistributedDataParallel, m) for m in models if hasattr(m, "no_sync")]


@contextmanager
def no_sync(models: Iterable[nn.Module | None]) -> Iterator[None]:
    """Skip gradient reduction. The forward pass must be inside too."""
    with ExitStack() as stack:
        for model in _reducing(models):
            stack.enter_context(model.no_sync())
        yield


def check_local(models: Sequence[nn.Module], params: Iterable[Tensor]) -> None:
    """Raise an error if processes cannot each perturb along their own gradient."""
    if any(map(is_sharded, params)):
        raise ValueError(
            "perturbation='local' does not support sharded parameters (FSDP2): each process "
            "holds only a part of every gradient. Use perturbation='global'."
        )
    if any(getattr(model, "static_graph", False) for model in models):
        raise ValueError(
            "perturbation='local' needs passes without gradient reduction, which DDP does not "
            "support with static_graph=True. Turn static_graph off."
        )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not _reducing(models):
        raise ValueError(
            "perturbation='local' needs the DistributedDataParallel module: pass model=ddp."
        )


def finds_unused(models: Iterable[nn.Module | None]) -> bool:
    """Whether DDP looks for parameters that a pass does not use."""
    return any(getattr(model, "find_unused_parameters", False) for model in models)


def broadcast_buffers_next(models: Iterable[nn.Module]) -> None:
    """Make DDP's next forward pass broadcast rank 0's buffers, as after a reduced backward."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = True


def average(
    params: list[Tensor], local: dict[Tensor, Tensor], models: Iterable[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """The mean over processes of the values that each holds for some of the parameters.

    Processes may have used different parameters (`find_unused_parameters`), so all of `params` take
    part, with zeros for missing values. Returns the parameters that any process used.
    """
    parallel = _reducing(models)
    if not parallel:
        return list(local), list(local.values())
    values = [local[p] if p in local else torch.zeros_like(p) for p in params]
    # `used` has the dtype of the last value, to share its bucket. A copy from the host would block,
    # so it is filled on the device if possible.
    everything = len(local) == len(params)
    used = values[-1].new_ones(len(params))
    if not everything:
        used.copy_(torch.tensor([float(p in local) for p in params]))
    _average([*values, used], parallel[0].process_group)
    if everything:
        return params, values
    somewhere = used.tolist()  # the host waits here, but only if a parameter is unused
    kept = [i for i, share in enumerate(somewhere) if share > 0]
    return [params[i] for i in kept], [values[i] for i in kept]


def _average(xs: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace every tensor with its mean over the group, in a few large all-reduces."""
    for bucket in _take_tensors(xs, BUCKET_BYTES):  # one dtype per bucket
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def one_device(params: Sequence[Tensor]) -> torch.device:
    """The device that all parameters share; raises an error if there are several."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"Parameters are on several devices ({names}), but a flatness-aware step needs one "
            "norm over all of them. Put the model on one device, or shard it with fully_shard."
        )
    return next(iter(devices), torch.device("cpu"))


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor, such as a parameter under FSDP2 (`fully_shard`)."""
    module = sys.modules.get("torch.distributed.tensor")  # if not loaded, none exist
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This process's part of `x`, sharing its memory; `x` itself if it is not sharded."""
    return cast(Any, x)._local_tensor if is_sharded(x) else x


def shard_groups(params: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """The process groups over which squared norms of local shards add up.

    One group per sharded mesh dimension; replicated dimensions hold equal copies. Empty if nothing
    is sharded.
    """
    layouts = {(p.device_mesh, p.placements) for p in cast(Any, params) if is_sharded(p)}
    if not layouts:
        return []
    # FSDP2 may shard tensors along different tensor dimensions; only mesh dimensions matter.
    axes = {(mesh, tuple(p.is_shard() for p in placements)) for mesh, placements in layouts}
    if len(axes) > 1 or not all(is_sharded(p) for p in params):
        raise ValueError(
            "Cannot compute a global gradient norm: parameters are sharded over different device "
            "meshes, or only some of them are sharded. Apply fully_shard to the whole model with "
            "one mesh."
        )
    mesh, placements = next(iter(layouts))
    return [mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard()]
