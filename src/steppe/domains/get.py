"""Download, unpack and arrange a dataset; its folder appears only when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from steppe.console import Console, say
from steppe.errors import UserError
from steppe.strangers import command

from .archives import find_folder, unpack
from .fetch import PATIENCE, Patience, Unavailable, download
from .spec import DatasetSpec, Source


def get(
    spec: DatasetSpec,
    root: Path,
    *,
    console: Console | None = None,
    patience: Patience = PATIENCE,
) -> Path:
    """Download a dataset, arrange it for `steppe.domains.load`, and return its folder.

    The archives stay in ``root/downloads``, so that an interrupted download can resume. A dataset's
    folder that already exists is never modified.
    """
    source = spec.source
    if spec.folder is None:
        raise UserError(f"{spec.name} needs no download")
    if source is None:
        raise UserError(f"steppe has no download location for {spec.name}")
    folder = root / spec.folder
    holds = source.holds or spec.domains
    if folder.is_dir() and any(folder.iterdir()):
        if missing := _missing(folder, holds):
            raise UserError(
                f"{folder} exists, but without {', '.join(missing)}. Move it away and rerun the "
                f"command, or complete it and run: steppe data check {spec.name}"
            )
        say(
            console,
            f"{folder} already exists: check it with 'steppe data check {spec.name}', or move it "
            "away to download it again",
        )
        return folder
    if not source.downloads:
        reason = f"{spec.name} must be downloaded by hand."
        raise UserError(_advice(reason, spec, source, folder))
    downloads = root / "downloads"
    try:
        files = [
            download(item, downloads, console=console, patience=patience)
            for item in source.downloads
        ]
    except Unavailable as error:
        reason = f"{spec.name} cannot be downloaded: {error}"
        put = downloads / error.file
        raise UserError(_advice(reason, spec, source, folder, put)) from None
    _lay_out(source, files, folder, holds, console)
    say(console, f"{spec.name} is in {folder}; you can delete the archives in {downloads}")
    return folder


def _lay_out(
    source: Source,
    files: Sequence[Path],
    folder: Path,
    holds: Sequence[str],
    console: Console | None,
) -> None:
    """Unpack and arrange files in a hidden folder next to `folder`, then rename it."""
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unpacked = stage / "unpacked"
        for item, file in zip(source.downloads, files, strict=True):
            say(console, f"unpacking {file.name}")
            unpack(file, unpacked / item.into)
        arranged = source.arrange(unpacked) if source.arrange else find_folder(unpacked, holds)
        if arranged is None or _missing(arranged, holds):
            found = sorted(path.name for path in (arranged or unpacked).iterdir())
            raise UserError(
                f"{', '.join(file.name for file in files)} should contain {', '.join(holds)}; "
                f"found {', '.join(found)}. Delete the download and rerun the command."
            )
        if folder.is_dir():
            folder.rmdir()  # fails unless it is empty
        os.rename(arranged, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"no room to unpack in {folder.parent}: {error.strerror}. Make room there and rerun "
            "the command; nothing is downloaded twice."
        ) from None
    finally:
        shutil.rmtree(stage)


def _missing(folder: Path, holds: Sequence[str]) -> list[str]:
    return [name for name in holds if not (folder / name).exists()]


def _advice(
    reason: str, spec: DatasetSpec, source: Source, folder: Path, file: Path | None = None
) -> str:
    """Explain how to get a dataset by hand; `file`, if given, could not be downloaded."""
    lines = [reason, "Where else to look:", *(f"  {place}" for place in source.elsewhere)]
    lines.append(f"  the paper: {spec.citation}")
    if file is None:
        lines.append("Arrange the files as")
    else:
        lines.append(f"Put {file.name} in {file.parent} and rerun the command,")
        lines.append("or arrange the files as")
    if source.holds:
        lines += [f"  {folder / name}" for name in source.holds]
    else:
        lines += [f"  {folder / name}/CLASS/IMAGE" for name in spec.domains]
        lines.append(f"with {spec.n_classes} classes in every domain,")
    lines.append(
        f"then run: {command('steppe', 'data', 'check', spec.name, '--root', folder.parent)}"
    )
    return "\n".join(lines)
