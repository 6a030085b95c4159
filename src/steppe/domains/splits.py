"""Splits of each domain into training and validation images, exactly as in DomainBed.

A source domain has the splits ``train`` and ``val``, a target domain ``test`` and ``oracle``.
DomainBed calls the larger one ``in`` and the smaller one ``out``. Tables report a target's ``test``
(its ``in``); only oracle selection reads ``oracle`` (its ``out``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steppe.errors import UserError, unknown

from .dataset import Dataset, Domain, Indices
from .folder import lines as lines_of
from .spec import DatasetSpec

SPLITS = ("domainbed", "appendix")
HOLDOUT = 0.2
"""The fraction of each domain that DomainBed uses for validation."""


def seed_hash(*args: object) -> int:
    """Return DomainBed's seed for any arguments: the md5 of the tuple's `str`, modulo 2^31.

    Examples:
        >>> seed_hash(0, 0)
        894182419
    """
    return int(hashlib.md5(str(args).encode()).hexdigest(), 16) % 2**31


def split_indices(n: int, holdout: float, seed: int) -> tuple[Indices, Indices]:
    """Split n images as DomainBed does, into the larger part and the held-out part.

    Examples:
        >>> larger, held_out = split_indices(10, 0.2, seed_hash(0, 0))
        >>> len(larger), len(held_out)
        (8, 2)
    """
    order = list(range(n))
    np.random.RandomState(seed).shuffle(order)
    cut = int(n * holdout)
    return np.array(order[cut:], dtype=np.int64), np.array(order[:cut], dtype=np.int64)


@dataclass(frozen=True)
class Split:
    """The two parts of a domain, by purpose."""

    domain: Domain
    position: int
    """The domain's number in its dataset, which seeds the split and the sampling."""
    source: bool
    parts: Mapping[str, Indices]
    """``train`` and ``val``, or ``test`` and ``oracle``."""

    @property
    def larger(self) -> Indices:
        """The part that DomainBed calls ``in``."""
        return self.parts["train" if self.source else "test"]


def split_dataset(
    dataset: Dataset,
    targets: Sequence[str],
    trial_seed: int,
    kind: str = "domainbed",
    sources: Sequence[str] = (),
    root: Path | None = None,
) -> tuple[Split, ...]:
    """Split every domain that a run uses, in the dataset's order.

    Args:
        dataset: the dataset.
        targets: the held-out domains.
        trial_seed: DomainBed's trial seed, which determines the split.
        kind: ``domainbed`` (20% of each domain), or ``appendix`` (the FAD paper's appendix: 30%
            for VLCS, the official lists for PACS, ``domainbed`` for all others).
        sources: the domains to train on (default: all except the targets).
        root: the dataset's folder, which contains its official lists.
    """
    spec, appendix = dataset.spec, kind == "appendix"
    if kind not in SPLITS:
        raise UserError(unknown("split", kind, SPLITS))
    names = [domain.name for domain in dataset.domains]
    for name in (*targets, *sources):
        if name not in names:
            raise UserError(f"{spec.name} has no domain {name!r}; its domains: {', '.join(names)}")
    both = sorted(set(targets) & set(sources))
    if both:
        raise UserError(f"domain {both[0]!r} is both a source and a target")
    sources = list(sources) or [name for name in names if name not in targets]
    if not sources:
        raise UserError(f"all domains of {spec.name} are targets: none is left to train on")
    splits: list[Split] = []
    for position, domain in enumerate(dataset.domains):
        if domain.name not in (*targets, *sources):
            continue
        source = domain.name in sources
        if domain.subsets:
            larger = domain.subsets["train" if source else "test"]
            held_out = domain.subsets["val"]
        elif appendix and spec.official_lists:
            larger, held_out = _listed(domain, spec, root or Path())
            if not source:  # the official test list has every image
                larger = np.arange(len(domain))
        else:
            share = spec.appendix_holdout if appendix else HOLDOUT
            seed = seed_hash(trial_seed, position)
            larger, held_out = split_indices(len(domain), share, seed)
        if not len(larger):
            n = len(domain)
            raise UserError(
                f"domain {domain.name!r} has {n} image{'s' * (n != 1)}, so none is left for "
                f"{'training' if source else 'testing'}"
            )
        keys = ("train", "val") if source else ("test", "oracle")
        parts = dict(zip(keys, (larger, held_out), strict=True))
        splits.append(Split(domain, position, source, parts))
    return tuple(splits)


def with_all_sources(splits: Sequence[Split]) -> tuple[Split, ...]:
    """The same splits, with all images of every source domain for training."""
    return tuple(
        replace(split, parts={"train": np.concatenate(list(split.parts.values()))})
        if split.source
        else split
        for split in splits
    )


def _listed(domain: Domain, spec: DatasetSpec, root: Path) -> tuple[Indices, Indices]:
    """Read the official split of a domain from its lists ``train`` and ``crossval``."""
    assert spec.official_lists is not None
    index = {domain.images.name(i): i for i in range(len(domain))}
    parts = []
    for part in ("train", "crossval"):
        file = spec.official_lists.format(domain=domain.name, part=part)
        path = root / "splits" / file if (root / "splits" / file).exists() else root / file
        if not path.exists():
            raise UserError(
                f"the split 'appendix' of {spec.name} needs its official lists, but {path} is "
                f"missing, as is {path.parent / 'splits' / file}. Copy the lists from the original "
                "download, or use --split domainbed."
            )
        # Each line is "domain/class/image label", with labels counted from 1.
        lines = [line.split() for line in lines_of(path)]
        names = [line[0].partition("/")[2] for line in lines if line]
        strangers = [name for name in names if name not in index]
        if strangers:
            raise UserError(f"{path} lists {strangers[0]!r}, which is not in {domain.name}")
        parts.append(np.array([index[name] for name in names], dtype=np.int64))
    return parts[0], parts[1]
