"""Data-parallel and sharded training: what the engine must know about other processes."""

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
"""Largest temporary of an average: gradients are reduced in flat buckets of about this size."""


def _reducing(models: Iterable[nn.Module | None]) -> list[DistributedDataParallel]:
    """Those that all-reduce gradients by themselves: DDP, or what offers the same."""
    return [cast(DistributedDataParallel, m) for m in models if hasattr(m, "no_sync")]


@contextmanager
def no_sync(models: Iterable[nn.Module | None]) -> Iterator[None]:
    """Forward and backward passes inside reduce nothing (the forward must be inside too)."""
    with ExitStack() as stack:
        for model in _reducing(models):
            stack.enter_context(model.no_sync())
        yield


def check_local(models: Sequence[nn.Module], params: Iterable[Tensor]) -> None:
    """Raises where processes cannot each perturb along their own gradient."""
    if any(map(is_sharded, params)):
        raise ValueError(
            "perturbation='local' is not available for sharded parameters (FSDP2): each "
            "process holds only a part of every gradient. Use perturbation='global'."
        )
    if any(getattr(model, "static_graph", False) for model in models):
        raise ValueError(
            "perturbation='local' needs passes that reduce nothing, which DDP does not allow "
            "with static_graph=True. Leave static_graph off."
        )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not _reducing(models):
        raise ValueError(
            "perturbation='local' needs the DistributedDataParallel module: pass model=ddp."
        )


def broadcast_buffers_next(models: Iterable[nn.Module]) -> None:
    """Has DDP's next forward pass send rank 0's buffers round, as after a reduced backward."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = True


def average(
    params: list[Tensor], local: dict[Tensor, Tensor], models: Iterable[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """The mean over the models' processes of what each holds for some of the parameters.

    Processes may have used different parameters (`find_unused_parameters`), so all of `params` take
    part, with zeros where a process has nothing. Returned are those that any process had.
    """
    parallel = _reducing(models)
    if not parallel:
        return list(local), list(local.values())
    values = [local[p] if p in local else torch.zeros_like(p) for p in params]
    # Who used what is of the last one's type, to travel in its bucket; filled on the device where
    # it can be, since a copy from the host would wait for it.
    everything = len(local) == len(params)
    used = values[-1].new_ones(len(params))
    if not everything:
        used.copy_(torch.tensor([float(p in local) for p in params]))
    _average([*values, used], parallel[0].process_group)
    if everything:
        return params, values
    somewhere = used.tolist()  # the host waits here, but only if a parameter was not used
    kept = [i for i, share in enumerate(somewhere) if share > 0]
    return [params[i] for i in kept], [values[i] for i in kept]


def _average(xs: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces every tensor by its mean over the group, in few large all-reduces."""
    for bucket in _take_tensors(xs, BUCKET_BYTES):  # torch's own for this: one type in each
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def one_device(params: Sequence[Tensor]) -> torch.device:
    """The device all parameters share, or an error that names the several."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"Parameters are on several devices ({names}); a flatness-aware step needs one norm "
            "over all of them. Put the model on one device, or shard it with fully_shard."
        )
    return next(iter(devices), torch.device("cpu"))


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor, as FSDP2 (`fully_shard`) makes of parameters."""
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: there can be none
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This process's part of `x`, sharing its memory; `x` itself when it is not sharded."""
    return cast(Any, x)._local_tensor if is_sharded(x) else x


def shard_groups(params: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """The process groups over which squared norms of local shards add up.

    One group per mesh dimension that some parameter is sharded over; replicated dimensions hold
    equal copies and add nothing. Empty when nothing is sharded.
    """
    layouts = {(p.device_mesh, p.placements) for p in cast(Any, params) if is_sharded(p)}
    if not layouts:
        return []
    # FSDP2 may shard tensors along different dimensions of theirs; only the mesh's matter here.
    axes = {(mesh, tuple(p.is_shard() for p in placements)) for mesh, placements in layouts}
    if len(axes) > 1 or not all(is_sharded(p) for p in params):
        raise ValueError(
            "Parameters are sharded over different device meshes, or only some of them are "
            "sharded: a global gradient norm cannot be formed. Apply fully_shard to the whole "
            "model with one mesh."
        )
    mesh, placements = next(iter(layouts))
    return [mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard()]
