"""Checkpoints: written atomically, verified when they are read.

A checkpoint is a folder ``checkpoint/step-000300`` with the weights (``model.safetensors``), the
other tensors of the state (``state.safetensors``) and ``state.json``, which holds the rest, their
checksums and its own. It is written under a temporary name, synced and renamed. The previous one is
kept as a fallback. ``checkpoint/best`` has the weights of the best record.
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
"""Checkpoints kept: the last one and a fallback."""
REPLACES = {"weights": "none", "class_embeddings": "none"}
"""Changes to a config whose run continues from a checkpoint: the initial weights' files may be
gone."""
MODEL = "model.safetensors"
_STATE = "state.safetensors"
_INDEX = "state.json"
_TEMPORARY = ".writing-"
_REPLACED = ".replaced-"

# What reading a foreign file may raise.
_NOT_OURS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError)

log = logging.getLogger("steppe")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    model: dict[str, Tensor]
    state: dict[str, Any]
    format: int = FORMAT


class Damaged(Exception):
    """A checkpoint's files are missing or do not match their checksums."""


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def save(root: Path, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint after `step`, then remove those that are no longer kept.

    Later ones are removed too: they are damaged, or the run would not have gone back to this step.
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
    """Load the newest intact checkpoint; None if there are no checkpoints.

    A damaged one is skipped with a warning. If all are damaged, that is an error: only the user may
    decide to start over and discard the run.
    """
    found = _folders(root)
    for path in found:
        try:
            return load(path)
        except Damaged as error:
            log.warning("%s; trying the previous one", error)
    if found:
        raise RunError(
            f"every checkpoint in {root} is damaged, so there is nothing to resume from. Remove "
            f"{root} to start the run over."
        )
    return None


def load_chosen(root: Path, step: int | None = None) -> Checkpoint | None:
    """Load the checkpoint after a step (default: the last); None if there are no checkpoints.

    Unlike `load_last`, it never falls back: results must not come from another step's weights.

    Raises:
        UserError: there is no checkpoint after that step.
        RunError: it is damaged; the message lists the intact ones.
    """
    while found := _folders(root):
        path = found[0] if step is None else root / folder_name(step)
        if path not in found:
            saved = ", ".join(str(_step(each)) for each in reversed(found))
            raise UserError(f"{root} has no checkpoint after step {step}: choose from {saved}")
        try:
            return load_this(path)
        except RunError:
            if path.exists():
                raise
            # A run in progress has written newer ones and removed this one.
    return None


def load_this(path: Path) -> Checkpoint:
    """Load a checkpoint; if it is damaged, the error lists the intact ones."""
    try:
        return load(path)
    except Damaged as error:
        raise RunError(f"{error}; {whole_ones(path.parent)}") from None


def whole_ones(root: Path) -> str:
    """Describe which checkpoints are intact, and how to choose one."""
    choices = {}
    for path in (*_folders(root), root / "best"):
        with suppress(Damaged):
            after = f"step {load(path).step}"
            if path.name == "best":
                choices["best"] = f"best ({after})"
            else:
                choices[after.replace(" ", ":")] = after
    if not choices:
        return "no other checkpoint is intact"
    intact = ", ".join(choices.values())
    return f"intact: {intact}. Choose one, for example with --which {next(iter(choices))}"


def any_saved(root: Path) -> bool:
    """Whether there is a checkpoint, intact or not."""
    return bool(_folders(root))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint folder and verify every checksum."""
    try:
        index = parse(read(path / _INDEX))
        claimed = index.pop("checksum")
        if claimed != _digest(_dump(index)):
            raise Damaged(f"checkpoint {path} is damaged: {_INDEX} does not match its checksum")
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
                raise Damaged(f"checkpoint {path} is damaged: {name} does not match its checksum")
            parts[name] = load_tensors(data)
        if type(index["step"]) is not int:
            raise ValueError(f"step {index['step']!r} is not an integer")
        if path.name != "best" and path.name != folder_name(index["step"]):
            raise ValueError(f"it belongs to step {index['step']}")
        state = tree.from_json(index.get("state"), parts[_STATE])
        return Checkpoint(path, index["step"], parts[MODEL], state or {}, index["format"])
    except (PermissionError, RunError):
        raise  # not damage, but something for the user to fix
    except OSError as error:  # missing, or a failing disk
        reason = f"{Path(error.filename or path).name}: {error.strerror}"
        raise Damaged(f"checkpoint {path} is damaged: {reason}") from None
    except _NOT_OURS as error:
        raise Damaged(f"checkpoint {path} is damaged: {_INDEX} is broken ({error})") from None


def clean(root: Path) -> None:
    """Remove what a killed writer left unfinished."""
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
    # Cloned, because safetensors rejects tensors that share memory.
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
    """Write a folder with these files durably, replacing an existing one."""
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
            # Two folders cannot be swapped atomically. After a kill between the renames, `clean`
            # puts the old one back.
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
    # Renamed first, so that a kill leaves garbage that `clean` removes, not half a checkpoint.
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
