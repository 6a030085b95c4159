"""Checkpoints: written whole or not at all, checked when they are read.

A checkpoint is a folder ``checkpoint/step-000300`` with the weights (``model.safetensors``), the
rest of the state's tensors (``state.safetensors``) and ``state.json``, which has their checksums
and its own. It is written under another name, flushed to the disk and renamed; the one before it is
kept, so that a damaged one can be passed over. ``checkpoint/best`` has the weights of the best
record.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from steppe.durable import durable, full_disk_explained, sync_folder
from steppe.errors import RunError, UserError
from steppe.strangers import is_name, parse, read

from . import tree

FORMAT = 2
KEPT = 2
"""Checkpoints kept: the last one and the one to fall back on."""
MODEL = "model.safetensors"
_STATE = "state.safetensors"
_INDEX = "state.json"
_TEMPORARY = ".writing-"
_REPLACED = ".replaced-"

# What reading files that we did not write may raise.
_NOT_OURS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError)

log = logging.getLogger("steppe")


@dataclass(frozen=True)
class Checkpoint:
    """What was read from a checkpoint folder."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: dict[str, Any]
    format: int = FORMAT


class Damaged(Exception):
    """A checkpoint whose files are missing or differ from their checksums."""


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def save(root: Path, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Writes the checkpoint after `step`, then removes those that are no longer kept.

    Later ones are not: the run went back behind them because they are damaged.
    """
    tensors: tree.Tensors = {}
    index = {"step": step, "state": tree.to_json(dict(state), tensors)}
    path = root / folder_name(step)
    _write(path, _files(dict(model), tensors, index))
    found = _folders(root)
    last = found.index(path)
    for old in (*found[:last], *found[last + KEPT :]):
        _remove(old)
    return path


def save_best(root: Path, step: int, model: Mapping[str, Tensor], value: float) -> None:
    _write(root / "best", _files(dict(model), {}, {"step": step, "value": value}))


def load_last(root: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none at all.

    A damaged one is passed over with a warning. If every one is damaged, that is an error: starting
    anew would throw the run away, and that is for a person to decide.
    """
    found = _folders(root)
    for path in found:
        try:
            return load(path)
        except Damaged as error:
            log.warning("%s; looking for the one before it", error)
    if found:
        raise RunError(
            f"every checkpoint in {root} is damaged: nothing to resume from. Remove {root} to "
            "start the run anew."
        )
    return None


def load_chosen(root: Path, step: int | None = None) -> Checkpoint | None:
    """The checkpoint after a step (default: the last), and no other; None if there is none at all.

    For what depends on the weights: a result of another step must not pass for this one's.

    Raises:
        UserError: there is no checkpoint after that step.
        RunError: it is damaged; says which ones are whole.
    """
    while found := _folders(root):
        path = found[0] if step is None else root / folder_name(step)
        if path not in found:
            saved = ", ".join(str(_step(each)) for each in reversed(found))
            raise UserError(f"{root} has no checkpoint after step {step}: it has {saved}")
        try:
            return load_this(path)
        except RunError:
            if path.exists():
                raise
            # A run that is still going has made newer ones, and removed this one.
    return None


def load_this(path: Path) -> Checkpoint:
    """A checkpoint; if it is damaged, the error says which others are whole."""
    try:
        return load(path)
    except Damaged as error:
        raise RunError(f"{error}; {whole_ones(path.parent)}") from None


def whole_ones(root: Path) -> str:
    """Which checkpoints are whole, and how to choose one."""
    choices = {}
    for path in (*_folders(root), root / "best"):
        with suppress(Damaged):
            after = f"step {load(path).step}"
            if path.name == "best":
                choices["best"] = f"best ({after})"
            else:
                choices[after.replace(" ", ":")] = after
    if not choices:
        return "no other checkpoint is whole"
    whole = ", ".join(choices.values())
    return f"whole: {whole}. Choose one, for instance with --which {next(iter(choices))}"


def any_saved(root: Path) -> bool:
    """Whether there is a checkpoint to go on from, whole or not."""
    return bool(_folders(root))


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint folder and checks every checksum."""
    try:
        index = parse(read(path / _INDEX))
        claimed = index.pop("checksum")
        if claimed != _digest(_dump(index)):
            raise Damaged(f"checkpoint {path} is damaged: {_INDEX} differs from its checksum")
        if index["format"] > FORMAT:
            raise RunError(
                f"checkpoint {path} was written by a newer steppe (format {index['format']}; this "
                f"one reads up to {FORMAT}): pip install -U steppe"
            )
        parts = {}
        for name, checksum in index["files"].items():
            if not is_name(name):
                raise ValueError(f"{name!r} is not the name of a file")
            data = read(path / name, sys.maxsize)  # a model may have any size
            if _digest(data) != checksum:
                raise Damaged(f"checkpoint {path} is damaged: {name} differs from its checksum")
            parts[name] = load_tensors(data)
        if type(index["step"]) is not int:
            raise ValueError(f"step {index['step']!r} is not a number")
        if path.name != "best" and path.name != folder_name(index["step"]):
            raise ValueError(f"it is of step {index['step']}")
        state = tree.from_json(index.get("state"), parts[_STATE])
        return Checkpoint(path, index["step"], parts[MODEL], state or {}, index["format"])
    except (PermissionError, RunError):
        raise  # nothing is damaged, but for a person to fix
    except OSError as error:  # missing, or on a broken disk
        reason = f"{Path(error.filename or path).name}: {error.strerror}"
        raise Damaged(f"checkpoint {path} is damaged: {reason}") from None
    except _NOT_OURS as error:
        raise Damaged(f"checkpoint {path} is damaged: {_INDEX} is broken ({error})") from None


def clean(root: Path) -> None:
    """Removes what a killed writer left unfinished."""
    for path in root.glob(f"{_REPLACED}*"):
        whole = root / path.name.removeprefix(_REPLACED)
        if not whole.exists():
            path.rename(whole)
    for prefix in (_TEMPORARY, _REPLACED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def _files(
    model: dict[str, Tensor], tensors: dict[str, Tensor], index: dict[str, Any]
) -> dict[str, bytes]:
    # A copy of its own for every name: safetensors refuses tensors that share memory.
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in model.items()}
    parts = {MODEL: save_tensors(plain), _STATE: save_tensors(tensors)}
    checksums = {name: _digest(data) for name, data in parts.items()}
    index = {"format": FORMAT, **index, "files": checksums}
    return {**parts, _INDEX: _dump({**index, "checksum": _digest(_dump(index))})}


def _dump(index: Mapping[str, Any]) -> bytes:
    return json.dumps(index, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    """A folder with these files, in place of the one that may be there, durably."""
    temporary, replaced = (path.with_name(p + path.name) for p in (_TEMPORARY, _REPLACED))
    for left_over in (temporary, replaced):
        shutil.rmtree(left_over, ignore_errors=True)
    with full_disk_explained(path):
        try:
            temporary.mkdir(parents=True)
            for name, data in files.items():
                with durable(temporary / name) as file:
                    file.write(data)
            sync_folder(temporary)
            # Two folders cannot be swapped at once. Killed between the two renames, the run has
            # none of that name, and `clean` puts the old one back.
            if path.exists():
                path.rename(replaced)
            temporary.rename(path)
            sync_folder(path.parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    shutil.rmtree(replaced, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """The step checkpoints, newest first."""
    found = (path for path in root.glob("step-*") if re.fullmatch(r"step-[0-9]{6,18}", path.name))
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name[5:])


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle leaves rubbish that `clean` knows, not half a checkpoint.
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
