"""Where the images of a run live, and how its batches come from there.

Three places, one result: the pixels that reach the network are the same, bit for bit.

- `Host`: workers read images, from files or from a pack, and transform them with Pillow.
- `Stream`: workers read the pixels of a pack ahead; they are transformed on the device.
- `Resident`: all pixels are on the device, uint8, and are transformed there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from steppe.domains.dataset import Arrays, Domain
from steppe.domains.pack import Packed
from steppe.domains.pool import cores

from .host import Host, Store
from .ondevice import Resident, Stream, size

__all__ = ["SHARE", "Host", "Resident", "Store", "Stream", "open_store", "size"]

log = logging.getLogger("steppe")

SHARE = 0.25
"""Of the device's free memory: what images may take of it before they are streamed instead."""


def open_store(
    place: str,
    to: torch.device,
    domains: Sequence[Domain],
    workers: int | None,
    processes: int = 1,
    compiled: bool = False,
) -> Store:
    """The place for the images of a run.

    Args:
        place: ``device``, ``stream``, ``host``; or ``auto``: on a CPU the host, and otherwise the
            device if packed images fit into a quarter of its free memory, a stream if they do not,
            and the host for files.
        to: the device.
        domains: the domains of the run.
        workers: processes that read (default: as many as are useful).
        processes: how many train on this machine.
        compiled: whether transforms on the device go through `torch.compile`.
    """
    known = all(isinstance(domain.images, Packed | Arrays) for domain in domains)
    in_memory = all(isinstance(domain.images, Arrays) for domain in domains)
    if place == "auto" and to.type == "cuda" and not known:
        log.info("images are read as files; 'steppe data pack' would let them live on the device")
    if place == "auto":
        place = "host"
        if to.type != "cpu" and known:
            free, _ = torch.cuda.mem_get_info(to)
            place = "device" if size(domains) <= SHARE * free else "stream"
    if place == "device":
        return Resident(to, domains, compiled)
    if workers is None:
        # On a CPU, readers would take the cores that compute; arrays need none.
        few = to.type == "cpu" or in_memory
        workers = 0 if few else max(1, min(8, cores() // processes))
    if place == "stream":
        return Stream(to, domains, workers, compiled)
    return Host(to, workers)
