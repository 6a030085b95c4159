"""Build the parts of a run from its config: data, algorithm, optimizer, device placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steppe.algorithms import Algorithm, Objective, algorithm_spec, build_algorithm
from steppe.domains import Dataset, Split, data_folder, load, split_dataset
from steppe.domains.splits import with_all_sources
from steppe.errors import UserError
from steppe.optim import build_optimizer, optimizer_spec

from .backbones import build_network
from .config import Named, RunConfig
from .embeddings import load_classifier
from .execution import Gears, choose_gears
from .processes import Processes


def open_data(config: RunConfig) -> tuple[Dataset, tuple[Split, ...]]:
    """Load a run's dataset, and split the domains that it uses.

    A second stage trains on the validation images too.
    """
    dataset = load(config.dataset, config.root, packed=config.packed)
    root = None
    if dataset.spec.folder is not None:
        root = Path(config.root or data_folder()) / dataset.spec.folder
    splits = split_dataset(
        dataset, config.targets, config.trial_seed, config.split, config.sources, root
    )
    return dataset, with_all_sources(splits) if config.second_stage else splits


def data_facts(dataset: Dataset, splits: Sequence[Split]) -> dict[str, Any]:
    """Contents of a run's `data.json`: classes, domains, image counts, fingerprint."""
    return {
        "dataset": dataset.spec.name,
        "classes": list(dataset.classes),
        "channels": dataset.spec.channels,
        "sources": [split.domain.name for split in splits if split.source],
        "images": {
            split.domain.name: {name: len(part) for name, part in split.parts.items()}
            for split in splits
        },
        "fingerprint": dataset.fingerprint(),
        "shrunk_to": dataset.shrunk_to,
    }


def build(
    config: RunConfig,
    n_classes: int,
    channels: int,
    n_sources: int,
    classes: Sequence[str] = (),
) -> Algorithm:
    """Build a run's algorithm around a freshly initialized network.

    `classes` are the names of the classes, which a file of their embeddings is asked for.
    """
    network = build_network(
        config.backbone,
        n_classes=n_classes,
        image_size=config.image_size,
        channels=channels,
        weights=config.weights,
        dropout=config.dropout,
        freeze_bn=config.freeze_bn,
        drop_path=config.drop_path,
        freeze=config.freeze,
        lora=config.lora,
        embedding=config.embedding,
    )
    if config.class_embeddings != "none":
        load_classifier(network, Path(config.class_embeddings), classes)
    chosen = config.algorithm
    steps = config.steps - config.linear_steps
    return build_algorithm(chosen.name, network, n_sources, steps=steps, **chosen.options)


def optimizer(
    chosen: Named,
    objective: Objective,
    model: nn.Module,
    fused: bool = False,
    facts: Mapping[str, Any] = MappingProxyType({}),
    lr_factors: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> Optimizer:
    """Build the optimizer of an objective: the run's, with the objective's changes.

    `fused` requests fused kernels, which need no host synchronization, if the optimizer has them.
    `facts` are options that the run knows, for optimizers that have them. `lr_factors` multiply
    those of the objective. Frozen parameters are left out.
    """
    spec = optimizer_spec(chosen.name)
    changed = {name: value for name, value in objective.options.items() if name in spec.keywords}
    for name in changed:
        if name in chosen.options and name not in spec.defaults():  # set by the user, not drawn
            raise UserError(
                f"the algorithm sets optimizer.{name} itself: leave it out (DANN and CDANN have "
                "algorithm.beta1)"
            )
    known = {name: value for name, value in facts.items() if name in spec.keywords}
    options = {**known, **chosen.options, **changed}
    plain = "foreach" in options or options.get("dampening")  # fused kernels mishandle it
    if fused and "fused" in spec.keywords and not plain:
        asked = ("fused", "capturable")  # torch requires the second for Adam in a graph
        options = {**{name: True for name in asked if name in spec.keywords}, **options}
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in objective.parameters:
        if parameter.requires_grad:
            factor = objective.lr_factors.get(parameter, 1.0) * lr_factors.get(parameter, 1.0)
            by_factor.setdefault(factor, []).append(parameter)
    if not by_factor:
        raise UserError(
            f"objective {objective.name!r} has nothing to train: every parameter of it is frozen. "
            "Freeze less, or leave out what trains these parameters"
        )
    groups = [
        {"params": parameters, "lr": options["lr"] * factor}
        for factor, parameters in by_factor.items()
    ]
    return build_optimizer(chosen.name, groups, model=model, **options)


def change_lr(optimizer: Optimizer, objective: Objective, step: int) -> None:
    """Multiply an optimizer's learning rates by the objective's factor for this step."""
    if (factor := objective.lr_steps.get(step)) is not None:
        for group in optimizer.param_groups:
            group["lr"] *= factor


def describe(config: RunConfig, n_sources: int, resolved: Mapping[str, str]) -> str:
    """Summarize a run's settings in one line, with `auto` resolved.

    Examples:
        >>> from steppe.training import make_config
        >>> config = make_config({"dataset": "RotatedDigits", "targets": "75", "optimizer": "sgd"})
        >>> resolved = dict(precision="fp32", device="cpu", engine="eager", data="in memory")
        >>> print(describe(config, 5, resolved))
        sgd (lr=0.02, weight_decay=0.0001, momentum=0.9), batch 5 x 32, 301 steps, fp32, cpu, eager,
        data in memory
    """
    axes = (config.algorithm, config.optimizer, config.averaging)
    named = [f"recipe {config.recipe}"] if config.recipe else []
    named += [_spelled(axis) for axis in axes if axis.name not in ("ERM", "none")]
    parts = [f"batch {n_sources} x {config.batch_size}", f"{config.steps:,} steps"]
    parts += [resolved[key] for key in ("precision", "device", "engine")]
    return ", ".join([*named, *parts, f"data {resolved['data']}"])


def _spelled(axis: Named) -> str:
    options = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in axis.options.items()
    )
    return f"{axis.name} ({options})" if options else axis.name


def refuse_validation(needing: Mapping[str, bool]) -> None:
    """Raise an error for the first setting that needs validation images, where there are none."""
    for name, needs in needing.items():
        if needs:
            raise UserError(
                f"{name} needs validation images, but the source domains have none: choose "
                "another split, or leave it out"
            )


def part_size(config: RunConfig, processes: Processes) -> int:
    """Images per domain in one forward pass of a process.

    Raises:
        UserError: the optimizer needs a single process, or the batch does not divide evenly.
    """
    name = config.optimizer.name
    if processes.world > 1 and optimizer_spec(name).needs_graph:
        raise UserError(
            f"{name} differentiates its gradient, which is impossible after several processes have "
            "averaged it: use one process, or another optimizer"
        )
    share = config.batch_size // processes.world
    if share % config.accumulate:
        raise UserError(
            f"batch_size={config.batch_size} over {processes.world} processes is not divisible "
            f"into accumulate={config.accumulate} equal parts"
        )
    algorithm_spec(config.algorithm.name).check_batch(share // config.accumulate)
    return share // config.accumulate


def gears(config: RunConfig, processes: Processes) -> Gears:
    return choose_gears(
        config.engine,
        processes.device,
        config.image_size,
        needs_graph=optimizer_spec(config.optimizer.name).needs_graph,
        world=processes.world,
        differentiates=algorithm_spec(config.algorithm.name).cls.differentiates,
    )


def memory_format(
    algorithm: nn.Module, image_size: int, number_format: str, device: torch.device
) -> torch.memory_format:
    """Channels-last where it is faster: for large images, on a CPU or on tensor cores.

    The exception is 32-bit depthwise convolutions on a GPU, which it makes many times slower.
    """
    depthwise = any(
        isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1 for m in algorithm.modules()
    )
    cores = number_format in ("fp16", "bf16") or (number_format == "tf32" and not depthwise)
    fast = image_size >= 64 and (device.type == "cpu" or cores)
    return torch.channels_last if fast else torch.contiguous_format


def parallel(algorithm: Algorithm, processes: Processes, several: bool) -> nn.Module:
    """Wrap the algorithm so that its gradients are averaged across processes.

    With `several` objectives, each leaves the others' parameters without gradients.
    """
    if processes.world == 1:
        return algorithm
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(algorithm, device_ids=ids, find_unused_parameters=several)
