"""Where the images of a run are stored and transformed.

All three stores give the network the same pixels, bit for bit.

- `Host`: workers read images from files or a pack and transform them with Pillow.
- `Stream`: workers read the pixels of a pack ahead, and the device transforms them.
- `Resident`: the device holds all pixels as uint8 and transforms them.
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
"""The fraction of the device's free memory that images may fill; larger datasets are streamed."""


def open_store(
    place: str,
    to: torch.device,
    domains: Sequence[Domain],
    workers: int | None,
    processes: int = 1,
    compiled: bool = False,
    captured: bool = False,
) -> Store:
    """Open a store for the images of a run.

    Args:
        place: ``device``, ``stream``, ``host``, or ``auto``. On a CPU and for image files, ``auto``
            is the host. On a GPU it is the device if the images fit into a quarter of its free
            memory, and a stream if they do not.
        to: the device.
        domains: the domains of the run.
        workers: the number of reading processes; None chooses it.
        processes: the number of training processes on this machine.
        compiled: whether to compile the transforms on the device.
        captured: whether to capture those of images on the device in a CUDA graph.
    """
    known = all(isinstance(domain.images, Packed | Arrays) for domain in domains)
    in_memory = all(isinstance(domain.images, Arrays) for domain in domains)
    if place == "auto" and to.type == "cuda" and not known:
        log.info("reading images from files; 'steppe data pack' would let the device hold them")
    if place == "auto":
        place = "host"
        if to.type != "cpu" and known:
            free, _ = torch.cuda.mem_get_info(to)
            place = "device" if size(domains) <= SHARE * free else "stream"
    if place == "device":
        return Resident(to, domains, compiled, captured)
    if workers is None:
        # On a CPU, workers would compete with the training for cores; arrays need no reading.
        few = to.type == "cpu" or in_memory
        workers = 0 if few else max(1, min(8, cores() // processes))
    if place == "stream":
        return Stream(to, domains, workers, compiled)
    return Host(to, workers)
