"""Weight files as published: read them without unpickling objects, and rename their tensors."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from steppe.errors import UserError

from .directory import RunDirectory
from .lora import merged
from .served import load_served

State = dict[str, Tensor]

_WRAPPERS = ("state_dict", "model", "teacher", "student")
"""Keys under which training scripts store the state dict; of DINO's two, the teacher is used."""
_FEATURIZER = "network.featurizer."
_PREFIXES = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before every key."""


@dataclass(frozen=True)
class Layout:
    """The names in a family of weight files.

    Attributes:
        name: who publishes such files.
        table: pattern of a whole key, and the backbone's name for it; the first match counts, and
            keys without a match are not the backbone's. Names that end with ``#0``, ``#1``, ... are
            the parts of one tensor.
        transposed: patterns of keys whose matrix is stored transposed.
    """

    name: str
    table: Mapping[str, str]
    transposed: tuple[str, ...] = ()

    def renamed(self, state: Mapping[str, Tensor]) -> State:
        """The backbone's weights under its own names."""
        found: State = {}
        parts: dict[str, dict[int, Tensor]] = {}
        for key, value in state.items():
            if (name := self.rename(key)) is None:
                continue
            if any(re.fullmatch(pattern, key) for pattern in self.transposed):
                value = value.T
            whole, hash_, number = name.partition("#")
            if hash_:
                parts.setdefault(whole, {})[int(number)] = value
            else:
                found[whole] = value
        for whole, values in parts.items():
            found[whole] = torch.cat([values[number] for number in sorted(values)])
        return found

    def rename(self, key: str) -> str | None:
        """The backbone's name for a key; None if it is not the backbone's."""
        for pattern, name in self.table.items():
            if match := re.fullmatch(pattern, key):
                return match.expand(name)
        return None


_BLOCK = r"transformer\.resblocks\.(\d+)\."
_LAYER = r"vision_model\.encoder\.layers\.(\d+)\."
LAYOUTS = (
    Layout("MoCo-v2", {r"encoder_q\.(.*)": r"\1"}),  # not encoder_k.*, queue and queue_ptr
    Layout("MoCo-v3", {r"base_encoder\.(.*)": r"\1"}),  # not momentum_encoder.* and predictor.*
    Layout("DINO", {r"backbone\.(.*)": r"\1"}),  # not head.*
    Layout("OpenCLIP with timm's tower", {r"visual\.trunk\.(.*)": r"\1"}),
    Layout(
        "CLIP",
        {
            r"visual\.class_embedding": r"cls_token",
            r"visual\.positional_embedding": r"pos_embed",
            r"visual\.conv1\.weight": r"patch_embed.proj.weight",
            r"visual\.ln_pre\.(.*)": r"norm_pre.\1",
            r"visual\.ln_post\.(.*)": r"norm.\1",
            r"visual\.proj": r"head.weight",
            rf"visual\.{_BLOCK}attn\.in_proj_(.*)": r"blocks.\1.attn.qkv.\2",
            rf"visual\.{_BLOCK}attn\.out_proj\.(.*)": r"blocks.\1.attn.proj.\2",
            rf"visual\.{_BLOCK}ln_(\d)\.(.*)": r"blocks.\1.norm\2.\3",
            rf"visual\.{_BLOCK}mlp\.c_fc\.(.*)": r"blocks.\1.mlp.fc1.\2",
            rf"visual\.{_BLOCK}mlp\.c_proj\.(.*)": r"blocks.\1.mlp.fc2.\2",
        },
        transposed=(r"visual\.proj",),
    ),
    Layout(
        "CLIP in transformers",
        {
            r"vision_model\.embeddings\.class_embedding": r"cls_token",
            r"vision_model\.embeddings\.position_embedding\.weight": r"pos_embed",
            r"vision_model\.embeddings\.patch_embedding\.weight": r"patch_embed.proj.weight",
            r"vision_model\.pre_layrnorm\.(.*)": r"norm_pre.\1",  # spelled so
            r"vision_model\.post_layernorm\.(.*)": r"norm.\1",
            r"visual_projection\.weight": r"head.weight",
            rf"{_LAYER}self_attn\.q_proj\.(.*)": r"blocks.\1.attn.qkv.\2#0",
            rf"{_LAYER}self_attn\.k_proj\.(.*)": r"blocks.\1.attn.qkv.\2#1",
            rf"{_LAYER}self_attn\.v_proj\.(.*)": r"blocks.\1.attn.qkv.\2#2",
            rf"{_LAYER}self_attn\.out_proj\.(.*)": r"blocks.\1.attn.proj.\2",
            rf"{_LAYER}layer_norm(\d)\.(.*)": r"blocks.\1.norm\2.\3",
            rf"{_LAYER}mlp\.(.*)": r"blocks.\1.mlp.\2",
        },
    ),
    Layout("torchvision or timm", {r"(.*)": r"\1"}),
    Layout(
        "DINOv2 or MAE",
        {
            r"(blocks\.\d+\.mlp)\.w12\.(.*)": r"\1.fc1.\2",
            r"(blocks\.\d+\.mlp)\.w3\.(.*)": r"\1.fc2.\2",
            r"(?!decoder_|mask_token)(.*)": r"\1",
        },
    ),
)
"""The known layouts; of equally good ones, the first counts."""


def read_tensors(path: Path, what: str = "weights") -> Any:
    """Read a safetensors or torch file without unpickling objects; `what` is the option's name."""
    if not path.is_file():
        or_run = ", nor a run's folder" if what == "weights" else ""
        raise UserError(f"{what} {path} cannot be read: not a file{or_run}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # DINO's files hold the script's arguments in this plain container. torch warns of archives
        # that it then refuses.
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            warnings.catch_warnings(action="ignore"),
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        advice = ""
        if "TorchScript" in str(error):
            advice = ". Save torch.jit.load(FILE).state_dict() instead, or use safetensors"
        raise UserError(f"{what} {path} cannot be read: {_line(error)}{advice}") from None
    except Exception as error:  # pickle.UnpicklingError, or anything a broken pickle raises
        raise UserError(
            f"{what} {path} contain more than tensors, or are damaged, and steppe does not "
            f"unpickle them ({type(error).__name__}): save only the state dict, or use safetensors"
        ) from None


def read_weights(path: Path) -> State:
    """Read a state dict from a safetensors or torch checkpoint file, or a run's backbone."""
    if (run := RunDirectory(path)).exists():
        found = load_served(run).tensors.items()
        own = {k.removeprefix(_FEATURIZER): v for k, v in found if k.startswith(_FEATURIZER)}
        return merged(own)
    state: Any = read_tensors(path)
    for key in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise UserError(f"weights {path} are not a state dict: expected tensors by name")
    return cast(State, dict(state))


def load_weights(
    module: nn.Module,
    path: Path,
    name: str,
    heads: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Load a backbone's weights from a published file.

    Args:
        module: the backbone.
        path: the file.
        name: the backbone's name, for messages.
        heads: names of the library's classifiers, which files may hold and the module lacks.
        optional: keys of the module that files may lack.

    Raises:
        UserError: the file cannot be read, or does not fit; the message names the nearest layout.
    """
    state = read_weights(path)
    while prefix := _prefix(state):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    own = module.state_dict()
    dropped = tuple(f"{head}." for head in heads)

    def foreign(renamed: State) -> list[str]:
        return sorted(k for k in renamed.keys() - own.keys() if not k.startswith(dropped))

    def fit(layout: Layout) -> tuple[int, bool, int]:
        renamed = layout.renamed(state)
        return len(renamed.keys() & own.keys()), bool(renamed), -len(foreign(renamed))

    layout = max(LAYOUTS, key=fit)
    fitted = _fitted(layout.renamed(state), own, module)
    # Batch counters are unused here, and converted weights lack them.
    spare = {key for key in own if key.endswith("num_batches_tracked") or key in optional}
    problems = {
        "missing": sorted(own.keys() - fitted.keys() - spare),
        "unexpected": foreign(fitted),
        "of another shape": sorted(
            key for key in own.keys() & fitted.keys() if own[key].shape != fitted[key].shape
        ),
    }
    for problem, keys in problems.items():
        if keys:
            few = len(keys) == 1
            what = (
                f"1 tensor is {problem}:" if few else f"{len(keys)} tensors are {problem}, such as"
            )
            known = (key for key in state if layout.rename(key) is not None)
            held = f"; the file has {next(known)!r}" if state else ""
            raise UserError(
                f"weights {path} do not fit {name!r}: {what} {keys[0]!r}{held}. The "
                f"nearest known layout is {layout.name}"
            )
    module.load_state_dict({k: fitted[k] for k in own.keys() & fitted.keys()}, strict=False)


def _fitted(state: State, own: Mapping[str, Tensor], module: nn.Module) -> State:
    """Weights with dimensions of size 1 as in the module, and positions for its image size."""
    found = dict(state)
    for key, value in state.items():
        wanted = own[key].shape if key in own else value.shape
        if [n for n in wanted if n > 1] == [n for n in value.shape if n > 1]:
            found[key] = value.reshape(wanted)
        elif key == "pos_embed" and value.shape[-1] == wanted[-1]:
            found[key] = _positions(value.reshape(1, -1, wanted[-1]), module)
    return found


def _positions(embedded: Tensor, module: Any) -> Tensor:
    """Resize a vision transformer's position embedding to its own grid of patches."""
    from timm import layers

    if not hasattr(module, "patch_embed"):
        return embedded
    before = 0 if getattr(module, "no_embed_class", False) else module.num_prefix_tokens
    grid = embedded.shape[1] - before
    if round(grid**0.5) ** 2 != grid:
        return embedded
    resized: Tensor = cast(Any, layers).resample_abs_pos_embed(
        embedded, new_size=list(module.patch_embed.grid_size), num_prefix_tokens=before
    )
    return resized


def _prefix(state: State) -> str:
    """A prefix of every key that is none of the model's; empty if there is none."""
    return next((one for one in _PREFIXES if state and all(k.startswith(one) for k in state)), "")


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
