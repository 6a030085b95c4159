"""What is known about a dataset before its images are looked at, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset import Contents


@dataclass(frozen=True)
class Mirror:
    """A place that has a file, and the checksum of what it has: ``md5:...`` or ``sha256:...``."""

    url: str
    checksum: str | None = None


@dataclass(frozen=True)
class Download:
    """A file, the name it is given here, and the places that have it, tried in order."""

    file: str
    mirrors: tuple[Mirror, ...]
    into: str = ""
    """The folder below the dataset's to unpack it in."""
    limit: int = 200 * 10**9
    """Bytes that it certainly does not have; a server that has more is not believed."""


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    Checksums are those that others have published for these very files; a file without one is
    believed the first time (see `fetch.download`).

    Attributes:
        downloads: the files that make it up; none where a program cannot fetch them.
        elsewhere: where else to look, for people: links die.
        holds: what its folder must hold; by default one folder for each domain.
        arrange: makes the dataset's folder out of the unpacked files and returns it; by default
            it is the folder among them that holds what it must.
    """

    downloads: tuple[Download, ...] = ()
    elsewhere: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    arrange: Callable[[Path], Path] | None = None


def google_drive(identifier: str, key: str = "") -> str:
    """The URL of a file on Google Drive, past the page that asks whether to skip the virus scan."""
    base = "https://drive.usercontent.google.com/download"
    return f"{base}?id={identifier}&export=download&confirm=t" + (key and f"&resourcekey={key}")


def same_file(file: str, checksum: str, *places: str) -> Download:
    """A file that several servers have, where a place ends in a slash under the same name."""
    urls = (place + file if place.endswith("/") else place for place in places)
    return Download(file, tuple(Mirror(url, checksum) for url in urls))


@dataclass(frozen=True)
class DatasetSpec:
    """What is known about a dataset before its images are looked at.

    Attributes:
        domains: the domains in DomainBed's order, which numbers them; folder names.
        labels: the domains' short names in tables.
        citation: the paper it comes from.
        read: returns the classes and the domains, given the dataset's folder.
        folder: its folder below the data folder, or None where it needs no files.
        counts: the number of images of each domain, or None where it is not known.
        steps: the length of a run as DomainBed counts it: the last record is at ``steps - 1``.
        checkpoint_every: steps between two evaluations.
        validate_every: steps between two looks at the validation loss, where something follows it
            more closely than evaluations do.
        validation_tolerance: how far, relatively, that loss may rise above where it converged
            before the run is taken to overfit.
        batch_size: images of each source domain in a step.
        batch_exponents: DomainBed searches batch sizes of 2^U(low, high).
        image_size: height and width of what the network sees.
        channels: 3, or what the arrays have.
        augment: whether training images are cropped, flipped and jittered at random.
        backbone: the network trained unless another is asked for.
        pretrained: whether the backbone starts from ImageNet weights.
        target_sets: what is held out together, where that is not one domain at a time.
        appendix_holdout: the share of a domain that the split ``appendix`` keeps for validation.
        official_lists: the names of its own lists of images, for the split ``appendix``.
        left_out: a file in its folder that lists images to leave out.
    """

    name: str
    domains: tuple[str, ...]
    labels: tuple[str, ...]
    n_classes: int
    citation: str
    read: Callable[[Path], Contents]
    folder: str | None = None
    counts: tuple[int, ...] | None = None
    steps: int = 5001
    checkpoint_every: int = 300
    validate_every: int = 100
    validation_tolerance: float = 0.3
    batch_size: int = 32
    batch_exponents: tuple[float, float] = (3, 5.5)
    image_size: int = 224
    channels: int = 3
    augment: bool = True
    backbone: str = "resnet50"
    pretrained: bool = True
    target_sets: tuple[tuple[str, ...], ...] = ()
    appendix_holdout: float = 0.2
    official_lists: str | None = None
    left_out: str | None = None
    source: Source | None = None

    @property
    def targets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of domains that a full evaluation holds out in turn."""
        return self.target_sets or tuple((name,) for name in self.domains)

    def label(self, domain: str) -> str:
        """The short name of a domain in tables."""
        return self.labels[self.domains.index(domain)]

    def where(self, home: Path) -> Path:
        """Its folder, given the data folder; the data folder itself where it needs no files."""
        return home / (self.folder or "")
