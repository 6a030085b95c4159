"""Where the datasets come from, and `get`, which brings one here.

Checksums are those that others have published for these very files; a file without one is believed
the first time (see `fetch.download`). Links die: when all are dead, `get` says where else to look.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from steppe.errors import UserError

from . import terra
from .archives import find_folder, unpack
from .catalog import DUPLICATES, DatasetSpec, dataset_spec
from .fetch import PATIENCE, Download, Mirror, Patience, Report, Tick, Unavailable, download, meter


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    Attributes:
        downloads: the files that make it up; none where a program cannot fetch them.
        elsewhere: where else to look, for people.
        holds: what its folder must hold; one folder for each domain unless given.
        arrange: makes the dataset's folder out of the unpacked files and returns it; unless given,
            it is the folder among them that holds what it must.
    """

    downloads: tuple[Download, ...] = ()
    elsewhere: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    arrange: Callable[[Path], Path] | None = None


def _drive(identifier: str, key: str = "") -> str:
    """A file on Google Drive, past the page that asks whether to skip the virus scan."""
    base = "https://drive.usercontent.google.com/download"
    return f"{base}?id={identifier}&export=download&confirm=t" + (key and f"&resourcekey={key}")


def _everywhere(file: str, checksum: str, *bases: str) -> Download:
    """A file that several servers have under the same name."""
    return Download(file, tuple(Mirror(base + file, checksum) for base in bases))


_SMALL = 10**9
"""The limit, in bytes, of files that have a hundredth of it."""
_BU = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
_BU_COPY = "https://huggingface.co/yashkant/evalmerge/resolve/main/domainnet/"
# LILA keeps the same files in three clouds.
_LILA = (
    "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/",
    "https://lilawildlife.blob.core.windows.net/lila-wildlife/caltechcameratraps/",
    "http://us-west-2.opendata.source.coop.s3.amazonaws.com/agentmorris/lila-wildlife/"
    "caltechcameratraps/",
)
_MNIST = (  # with torchvision's checksums
    ("train-images-idx3-ubyte", "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("train-labels-idx1-ubyte", "md5:d53e105ee54ea40749a09fcbcd1e9432"),
    ("t10k-images-idx3-ubyte", "md5:9fb629c4189551a2d022fa330f9573f3"),
    ("t10k-labels-idx1-ubyte", "md5:ec29112dd5afa0611ce80d1b7f02629c"),
)
_MNIST_BASES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_OFFICE_HOME = "md5:b1c14819770c4448fd5b6d931031c91c"

_mnist = Source(
    downloads=tuple(
        Download(
            f"{file}.gz",
            tuple(Mirror(f"{base}{file}.gz", checksum) for base in _MNIST_BASES),
            into="raw",
            limit=_SMALL,
        )
        for file, checksum in _MNIST
    ),
    elsewhere=("torchvision.datasets.MNIST(DIR, download=True) makes the same MNIST/raw in DIR",),
    holds=tuple(f"raw/{file}" for file, _ in _MNIST),
)

SOURCES: dict[str, Source] = {
    "PACS": Source(
        downloads=(
            Download(
                "PACS.zip",
                (
                    # DomainBed's archive, in a folder kfold.
                    Mirror(_drive("1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd")),
                    # The same 9,991 images packed anew, in a folder PACS.
                    Mirror(
                        "https://huggingface.co/datasets/Azeez577/PACS/resolve/"
                        "fb1ee820df83b4e9957251d9f6973eb6d424c494/PACS.zip",
                        "sha256:42bf567f1ed8a01d522e47e4a677e2a3149577bbd6fcbb38bedfdd73cb59e147",
                    ),
                ),
            ),
        ),
        elsewhere=(
            "https://domaingeneralization.github.io (the authors' page)",
            "https://huggingface.co/datasets/flwrlabs/pacs (parquet: export its images)",
            "https://www.kaggle.com/datasets/nickfratto/pacs-dataset",
        ),
    ),
    "VLCS": Source(
        downloads=(
            Download(
                "VLCS.tar.gz",
                (
                    Mirror(
                        _drive("1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),
                        "md5:8870171eba660927d9668f4e515928e4",
                    ),
                ),
            ),
        ),
        elsewhere=(
            "https://www.mediafire.com/file/7yv132lgn1v267r/vlcs.tar.gz/file (smaller images; take "
            "its parts full and test; CALTECH, LABELME, SUN, PASCAL are the domains, 0 to 4 the "
            "classes bird, car, chair, dog, person)",
            "https://github.com/facebookresearch/DomainBed (domainbed/misc/vlcs_files.txt lists "
            "the original images)",
        ),
    ),
    "OfficeHome": Source(
        downloads=(
            Download(
                "OfficeHomeDataset_10072016.zip",
                (
                    Mirror(_drive("1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC"), _OFFICE_HOME),
                    Mirror(
                        _drive("0B81rNlvomiwed0V1YUxQdC1uOTg", "0-2SNWq0CDAuWOBRRBL7ZZsw"),
                        _OFFICE_HOME,
                    ),
                ),
            ),
        ),
        elsewhere=(
            "https://www.hemanthdv.org/officeHomeDataset.html (the authors' page)",
            "https://huggingface.co/datasets/flwrlabs/office-home (parquet: export its images)",
        ),
    ),
    "TerraIncognita": Source(
        downloads=(
            _everywhere(
                "eccv_18_annotations.tar.gz", "md5:66a1f481b44aa1edadf75c9cfbd27aba", *_LILA
            ),
            _everywhere(
                "eccv_18_all_images_sm.tar.gz", "md5:8143c17aa2a12872b66f284ff211531f", *_LILA
            ),
        ),
        elsewhere=("https://lila.science/datasets/caltech-camera-traps (CCT20 benchmark subset)",),
        arrange=terra.arrange,
    ),
    "DomainNet": Source(
        downloads=(
            # Small and needed: DomainBed's counts are without the images it lists.
            Download(
                DUPLICATES,
                (
                    Mirror(
                        "https://raw.githubusercontent.com/facebookresearch/DomainBed/main/"
                        f"domainbed/misc/{DUPLICATES}"
                    ),
                ),
                limit=_SMALL,
            ),
            # The cleaned versions of clipart and painting are in a folder of their own.
            _everywhere(
                "clipart.zip",
                "md5:cd0d8f2d77a4e181449b78ed62bccf1e",
                f"{_BU}groundtruth/",
                _BU_COPY,
            ),
            _everywhere("infograph.zip", "md5:720380b86f9e6ab4805bb38b6bd135f8", _BU, _BU_COPY),
            _everywhere(
                "painting.zip",
                "md5:1ae32cdb4f98fe7ab5eb0a351768abfd",
                f"{_BU}groundtruth/",
                _BU_COPY,
            ),
            _everywhere("quickdraw.zip", "md5:bdc1b6f09f277da1a263389efe0c7a66", _BU, _BU_COPY),
            _everywhere("real.zip", "md5:dcc47055e8935767784b7162e7c7cca6", _BU, _BU_COPY),
            _everywhere("sketch.zip", "md5:658d8009644040ff7ce30bb2e820850f", _BU, _BU_COPY),
        ),
        elsewhere=(
            "https://ai.bu.edu/M3SDA (the authors' page: take the cleaned version)",
            "https://huggingface.co/datasets/wltjr1007/DomainNet (parquet: export its images)",
        ),
    ),
    "NICO++": Source(
        elsewhere=(
            "https://nicochallenge.com/dataset and https://github.com/xxgege/NICO-plus (the "
            "authors' pages; the folders wanted are track_1/public_dg_0416/train/DOMAIN)",
            "https://huggingface.co/datasets/2018LZY/NICOplusplus",
        ),
    ),
    "RotatedMNIST": _mnist,
    "ColoredMNIST": _mnist,
}


def get(
    name: str,
    root: Path,
    *,
    source: Source | None = None,
    report: Report = print,
    tick: Tick | None = None,
    patience: Patience = PATIENCE,
) -> Path:
    """Downloads a dataset and lays it out as `steppe.domains.load` expects it.

    The archives are kept in ``root/downloads``, where an interrupted download goes on. The
    dataset's folder appears only when it is complete, and one that exists is never touched.

    Args:
        name: a name from `dataset_names()`.
        root: the data folder.
        source: where it comes from; what `SOURCES` says unless given.
        report: told what happens, a line at a time.
        tick: told how far a file is; unless given, a bar on a terminal and plain lines elsewhere.
        patience: how long to try each mirror.

    Returns:
        The dataset's folder.

    Raises:
        UserError: with every URL and why it failed, where else to look and how to lay the files
            out, where no mirror has a file; or with what else is to be done.
    """
    spec = dataset_spec(name)
    source = source or SOURCES.get(spec.name)
    if spec.folder is None:
        raise UserError(f"{spec.name} needs no download")
    if source is None:
        raise UserError(f"steppe knows no download of {spec.name}")
    folder = root / spec.folder
    holds = source.holds or spec.domains
    if folder.is_dir() and any(folder.iterdir()):
        missing = _missing(folder, holds)
        if missing:
            raise UserError(
                f"{folder} is there, but without {', '.join(missing)}. Move it away and run the "
                f"same command again, or complete it, then: steppe data check {spec.name}"
            )
        report(
            f"{folder} is already there: check it with 'steppe data check {spec.name}', or move it "
            "away to download it again"
        )
        return folder
    if not source.downloads:
        reason = f"{spec.name} has no download that a program can start."
        raise UserError(_advice(reason, spec, source, folder))
    downloads = root / "downloads"
    try:
        with nullcontext(tick) if tick is not None else meter(report) as shown:
            files = [
                download(item, downloads, report=report, tick=shown, patience=patience)
                for item in source.downloads
            ]
    except Unavailable as error:
        reason = f"{spec.name} cannot be downloaded: {error}"
        put = downloads / error.file
        raise UserError(_advice(reason, spec, source, folder, put)) from None
    _lay_out(source, files, folder, holds, report)
    report(f"{spec.name} is in {folder}; the archives in {downloads} may be deleted")
    return folder


def _lay_out(
    source: Source, files: Sequence[Path], folder: Path, holds: Sequence[str], report: Report
) -> None:
    """Unpacks and arranges in a hidden folder beside `folder`, then renames it in one step."""
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unpacked = stage / "unpacked"
        for item, file in zip(source.downloads, files, strict=True):
            report(f"unpacking {file.name}")
            unpack(file, unpacked / item.into)
        arranged = source.arrange(unpacked) if source.arrange else find_folder(unpacked, holds)
        if arranged is None or _missing(arranged, holds):
            found = sorted(path.name for path in (arranged or unpacked).iterdir())
            raise UserError(
                f"{', '.join(file.name for file in files)} should hold {', '.join(holds)}; found "
                f"{', '.join(found)}. Delete it and run the same command again."
            )
        if folder.is_dir():
            folder.rmdir()  # only ever an empty one
        os.rename(arranged, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"no room to unpack in {folder.parent}: {error.strerror}. Make room there and run the "
            "same command again; nothing is downloaded twice."
        ) from None
    finally:
        shutil.rmtree(stage)


def _missing(folder: Path, holds: Sequence[str]) -> list[str]:
    return [name for name in holds if not (folder / name).exists()]


def _advice(
    reason: str, spec: DatasetSpec, source: Source, folder: Path, file: Path | None = None
) -> str:
    """What to do by hand, where `file` could not be downloaded or there is nothing to download."""
    lines = [reason, "Where else to look:", *(f"  {place}" for place in source.elsewhere)]
    lines.append(f"  the paper: {spec.citation}")
    if file is not None:
        lines.append(f"Put {file.name} in {file.parent} and run the same command again,")
    lines.append("Lay the files out as" if file is None else "or lay the files out as")
    below = "" if source.holds else "/CLASS/IMAGE"
    lines += [f"  {folder / name}{below}" for name in source.holds or spec.domains]
    if not source.holds:
        lines.append(f"with {spec.n_classes} classes in every domain,")
    lines.append(f"then: steppe data check {spec.name} --root {shlex.quote(str(folder.parent))}")
    return "\n".join(lines)
