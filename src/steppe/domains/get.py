"""Bringing a dataset here: downloaded, unpacked, arranged, and there only when it is whole."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from steppe.console import Console, say
from steppe.errors import UserError

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
    """Downloads a dataset, lays it out as `steppe.domains.load` expects it, returns its folder.

    The archives are kept in ``root/downloads``, where an interrupted download goes on. The
    dataset's folder appears only when it is complete, and one that exists is never touched.
    """
    source = spec.source
    if spec.folder is None:
        raise UserError(f"{spec.name} needs no download")
    if source is None:
        raise UserError(f"steppe knows no download of {spec.name}")
    folder = root / spec.folder
    holds = source.holds or spec.domains
    if folder.is_dir() and any(folder.iterdir()):
        if missing := _missing(folder, holds):
            raise UserError(
                f"{folder} is there, but without {', '.join(missing)}. Move it away and run the "
                f"same command again, or complete it, then: steppe data check {spec.name}"
            )
        say(
            console,
            f"{folder} is already there: check it with 'steppe data check {spec.name}', or move it "
            "away to download it again",
        )
        return folder
    if not source.downloads:
        reason = f"{spec.name} has no download that a program can start."
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
    say(console, f"{spec.name} is in {folder}; the archives in {downloads} may be deleted")
    return folder


def _lay_out(
    source: Source,
    files: Sequence[Path],
    folder: Path,
    holds: Sequence[str],
    console: Console | None,
) -> None:
    """Unpacks and arranges in a hidden folder beside `folder`, then renames it in one step."""
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
    if file is None:
        lines.append("Lay the files out as")
    else:
        lines.append(f"Put {file.name} in {file.parent} and run the same command again,")
        lines.append("or lay the files out as")
    if source.holds:
        lines += [f"  {folder / name}" for name in source.holds]
    else:
        lines += [f"  {folder / name}/CLASS/IMAGE" for name in spec.domains]
        lines.append(f"with {spec.n_classes} classes in every domain,")
    lines.append(f"then: steppe data check {spec.name} --root {shlex.quote(str(folder.parent))}")
    return "\n".join(lines)
