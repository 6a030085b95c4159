"""What is known of images without reading them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steppe.domains.dataset import Arrays, Domain, Images, Indices
from steppe.domains.pack import Packed
from steppe.errors import UserError


def shapes(domain: Domain) -> tuple[Indices, Indices]:
    """Heights and widths of a domain's images, without reading them."""
    images = domain.images
    if isinstance(images, Packed):
        return images.rows["height"].astype(np.int64), images.rows["width"].astype(np.int64)
    if isinstance(images, Arrays):
        height, width = images.pixels.shape[1:3]
        return np.full(len(images), height), np.full(len(images), width)
    raise UserError(
        f"the images of {domain.name} are files, whose pixels can neither be kept on the device "
        "nor streamed: pack them with 'steppe data pack', or set data=host"
    )


def check_channels(domains: Sequence[Domain]) -> None:
    """Refuses domains whose images cannot be in one batch."""
    first = domains[0]
    for other in domains:
        if channels(other.images) != channels(first.images):
            raise UserError(
                f"images of {first.name} have {channels(first.images)} channels and those of "
                f"{other.name} {channels(other.images)}: they cannot be in one batch"
            )


def channels(images: Images) -> int:
    return images.pixels.shape[3] if isinstance(images, Arrays) else 3


def size(domains: Sequence[Domain]) -> int:
    """The bytes of all pixels of some domains, packed or in memory."""
    return sum(
        int((heights * widths).sum()) * channels(domain.images)
        for domain in domains
        for heights, widths in (shapes(domain),)
    )
