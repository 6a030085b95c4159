"""The facts about a dataset that need no images, and where to download it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset import Contents


@dataclass(frozen=True)
class Mirror:
    """A URL of a file and the file's checksum, ``md5:...`` or ``sha256:...``."""

    url: str
    checksum: str | None = None


@dataclass(frozen=True)
class Download:
    """A file to download, with its mirrors in the order to try them."""

    file: str
    """The local file name."""
    mirrors: tuple[Mirror, ...]
    into: str = ""
    """Where to unpack it, relative to the dataset's folder."""
    limit: int = 200 * 10**9
    """Maximum size in bytes. A download that is larger fails."""


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    Checksums are ones that others published for exactly these files. A file without one is trusted
    on first download (see `fetch.download`).

    Attributes:
        downloads: the files to download; empty if the dataset must be downloaded by hand.
        elsewhere: other places where a person can look if the links are dead.
        holds: what the dataset's folder must contain (default: one folder per domain).
        arrange: builds the dataset's folder from the unpacked files and returns it (default: find
            the unpacked folder that contains `holds`).
    """

    downloads: tuple[Download, ...] = ()
    elsewhere: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    arrange: Callable[[Path], Path] | None = None


def google_drive(identifier: str, key: str = "") -> str:
    """Return the URL of a Google Drive file that skips the virus-scan confirmation page."""
    base = "https://drive.usercontent.google.com/download"
    return f"{base}?id={identifier}&export=download&confirm=t" + (key and f"&resourcekey={key}")


def same_file(file: str, checksum: str, *places: str) -> Download:
    """Describe a file with several mirrors; the file name is appended to URLs that end in "/"."""
    urls = (place + file if place.endswith("/") else place for place in places)
    return Download(file, tuple(Mirror(url, checksum) for url in urls))


@dataclass(frozen=True)
class DatasetSpec:
    """The facts about a dataset that need no images.

    Attributes:
        domains: the domains' folder names, in DomainBed's order, which numbers them.
        labels: the domains' short names in tables.
        citation: the paper that introduced it.
        read: returns the class names and the domains, given the dataset's folder.
        folder: its folder, relative to the data folder; None if it needs no files.
        counts: the number of images per domain; None if unknown.
        steps: the length of a run as DomainBed counts it: the last record is at ``steps - 1``.
        checkpoint_every: steps between evaluations.
        validate_every: steps between evaluations of the validation loss, for averaging methods that
            follow it more closely.
        validation_tolerance: the relative rise of that loss above its converged value at which the
            run counts as overfitting.
        batch_size: images per source domain in each step.
        batch_exponents: DomainBed samples batch sizes from 2^U(low, high).
        image_size: height and width of the network's input.
        channels: the number of channels: 3 for image files.
        augment: whether training images are randomly cropped, flipped, and jittered.
        backbone: the default network.
        pretrained: whether the backbone starts from ImageNet weights.
        target_sets: the sets of domains to hold out together (default: each domain alone).
        appendix_holdout: the fraction of a domain that the split ``appendix`` uses for validation.
        official_lists: the file names of its official image lists, for the split ``appendix``.
        left_out: a file in its folder that lists images to exclude.
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
        """The target sets of a full leave-one-domain-out evaluation."""
        return self.target_sets or tuple((name,) for name in self.domains)

    def label(self, domain: str) -> str:
        """Return a domain's short name in tables."""
        return self.labels[self.domains.index(domain)]

    def where(self, home: Path) -> Path:
        """Return its folder below the data folder `home`, or `home` itself if it needs no files."""
        return home / (self.folder or "")
