"""Which images a run trains on and which it keeps for validation, exactly as DomainBed splits.

A source domain has the splits ``train`` and ``val``, a target domain ``test`` and ``oracle``.
DomainBed calls the larger one of each ``in`` and the smaller one ``out``: what a table reports is a
target's ``test`` (its ``in``), and ``oracle`` (its ``out``) is looked at by oracle selection only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steppe.errors import UserError

from .dataset import Dataset, Domain, Indices
from .folder import lines as lines_of
from .spec import DatasetSpec

SPLITS = ("domainbed", "appendix")
HOLDOUT = 0.2
"""The share of each domain that DomainBed keeps for validation."""


def seed_hash(*args: object) -> int:
    """DomainBed's seed from anything: md5 of the tuple's `str`, modulo 2^31.

    Examples:
        >>> seed_hash(0, 0)
        894182419
    """
    return int(hashlib.md5(str(args).encode()).hexdigest(), 16) % 2**31


def split_indices(n: int, holdout: float, seed: int) -> tuple[Indices, Indices]:
    """DomainBed's split of n images: the larger part, then the part held out.

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
    """The two parts of a domain, by what they are for."""

    domain: Domain
    position: int
    """The domain's number in its dataset: it seeds the split and the sampling."""
    source: bool
    parts: Mapping[str, Indices]
    """``train`` and ``val``, or ``test`` and ``oracle``."""

    @property
    def larger(self) -> Indices:
        """What DomainBed calls ``in``."""
        return self.parts["train" if self.source else "test"]


def split_dataset(
    dataset: Dataset,
    targets: Sequence[str],
    trial_seed: int,
    kind: str = "domainbed",
    sources: Sequence[str] = (),
    root: Path | None = None,
) -> tuple[Split, ...]:
    """Splits every domain that a run uses, in the dataset's order.

    Args:
        dataset: the dataset.
        targets: the domains held out.
        trial_seed: DomainBed's: another one gives another split.
        kind: ``domainbed`` (20 % of each domain), or ``appendix`` (the FAD paper's appendix: 30 %
            for VLCS, the official lists for PACS, and otherwise as ``domainbed``).
        sources: the domains to train on (default: all that are not targets).
        root: the dataset's folder, for its official lists.
    """
    if kind not in SPLITS:
        raise UserError(f"unknown split {kind!r}: known are {', '.join(SPLITS)}")
    names = [domain.name for domain in dataset.domains]
    for name in (*targets, *sources):
        if name not in names:
            raise UserError(f"{dataset.spec.name} has no domain {name!r}: {', '.join(names)}")
    both = sorted(set(targets) & set(sources))
    if both:
        raise UserError(f"domain {both[0]!r} is both a source and a target")
    sources = list(sources) or [name for name in names if name not in targets]
    if not sources:
        raise UserError(f"all domains of {dataset.spec.name} are targets: none is left to train on")
    appendix, spec = kind == "appendix", dataset.spec
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
            if not source:  # its third list, of images to test on, has them all
                larger = np.arange(len(domain))
        else:
            share = spec.appendix_holdout if appendix else HOLDOUT
            seed = seed_hash(trial_seed, position)
            larger, held_out = split_indices(len(domain), share, seed)
        if not len(larger):
            raise UserError(
                f"domain {domain.name!r} has {len(domain)} images, and none is left for "
                f"{'training' if source else 'testing'}"
            )
        keys = ("train", "val") if source else ("test", "oracle")
        parts = dict(zip(keys, (larger, held_out), strict=True))
        splits.append(Split(domain, position, source, parts))
    return tuple(splits)


def _listed(domain: Domain, spec: DatasetSpec, root: Path) -> tuple[Indices, Indices]:
    """A dataset's own split of a domain, from its lists for ``train`` and ``crossval``."""
    assert spec.official_lists is not None
    index = {domain.images.name(i): i for i in range(len(domain))}
    parts = []
    for part in ("train", "crossval"):
        file = spec.official_lists.format(domain=domain.name, part=part)
        path = root / "splits" / file if (root / "splits" / file).exists() else root / file
        if not path.exists():
            raise UserError(
                f"the split 'appendix' of {spec.name} needs its official lists: {path} is missing "
                "(or in 'splits'). They come with the original download; or use --split domainbed."
            )
        # A line is "domain/class/image label", the label counted from 1.
        lines = [line.split() for line in lines_of(path)]
        names = [line[0].partition("/")[2] for line in lines if line]
        unknown = [name for name in names if name not in index]
        if unknown:
            raise UserError(f"{path} lists {unknown[0]!r}, which is not in {domain.name}")
        parts.append(np.array([index[name] for name in names], dtype=np.int64))
    return parts[0], parts[1]
