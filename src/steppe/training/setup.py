"""What a run is made of, from its config: data, algorithm, and how they are placed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steppe.algorithms import Algorithm, Objective, build_algorithm
from steppe.domains import Arrays, Dataset, Split, data_folder, load, split_dataset
from steppe.domains.pool import cores
from steppe.errors import UserError
from steppe.optim import build_optimizer, optimizer_spec

from .backbones import build_network
from .config import Named, RunConfig
from .processes import Processes


def open_data(config: RunConfig) -> tuple[Dataset, tuple[Split, ...]]:
    """The dataset of a run, and the splits of the domains it uses."""
    dataset = load(config.dataset, config.root, packed=config.packed)
    root = None
    if dataset.spec.folder is not None:
        root = Path(config.root or data_folder()) / dataset.spec.folder
    splits = split_dataset(
        dataset, config.targets, config.trial_seed, config.split, config.sources, root
    )
    return dataset, splits


def data_facts(dataset: Dataset, splits: Sequence[Split]) -> dict[str, Any]:
    """What a run learns from, for its folder to remember."""
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


def build(config: RunConfig, n_classes: int, channels: int, n_sources: int) -> Algorithm:
    """The algorithm of a run around its network, freshly initialized."""
    network = build_network(
        config.backbone,
        n_classes=n_classes,
        image_size=config.image_size,
        channels=channels,
        weights=config.weights,
        dropout=config.dropout,
        freeze_bn=config.freeze_bn,
    )
    return build_algorithm(config.algorithm.name, network, n_sources, **config.algorithm.options)


def optimizer(chosen: Named, objective: Objective, model: nn.Module) -> Optimizer:
    """The optimizer of an objective: that of the run, with what the objective changes of it."""
    spec = optimizer_spec(chosen.name)
    changed = {name: value for name, value in objective.options.items() if name in spec.options}
    for name in changed:
        if name in chosen.options and name not in spec.defaults:  # given by the user, not drawn
            raise UserError(
                f"optimizer.{name} is the algorithm's to set here: leave it out (DANN and CDANN "
                "have algorithm.beta1)"
            )
    options = {**chosen.options, **changed}
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in objective.parameters:
        by_factor.setdefault(objective.lr_factors.get(parameter, 1.0), []).append(parameter)
    groups = [
        {"params": parameters, "lr": options["lr"] * factor}
        for factor, parameters in by_factor.items()
    ]
    return build_optimizer(chosen.name, groups, model=model, **options)


def reader_count(config: RunConfig, dataset: Dataset, processes: Processes) -> int:
    """How many processes read images for this one."""
    if config.workers is not None:
        return config.workers
    # On a CPU, readers would take the cores that compute; arrays need none.
    in_memory = all(isinstance(domain.images, Arrays) for domain in dataset.domains)
    if processes.device.type == "cpu" or in_memory:
        return 0
    return max(1, min(8, cores() // processes.world))


def memory_format(config: RunConfig, device: torch.device) -> torch.memory_format:
    """Channels-last where it is faster: large images on a CPU, half precision on a GPU."""
    large = config.image_size >= 64
    half = config.precision in ("fp16", "bf16")
    return (
        torch.channels_last if large and (device.type == "cpu" or half) else torch.contiguous_format
    )


def parallel(algorithm: Algorithm, processes: Processes, several: bool) -> nn.Module:
    """The algorithm, wrapped so that its gradients are averaged over the processes.

    `several` objectives leave each others' parameters without gradients.
    """
    if processes.world == 1:
        return algorithm
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(algorithm, device_ids=ids, find_unused_parameters=several)
