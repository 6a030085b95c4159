"""Nested state as JSON and named tensors, so that checkpoints need no pickle.

Dictionaries, lists, tuples and plain values become JSON; tensors are stored beside it by name.
Reading restores the same types, integer keys included, and the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def to_json(tree: Any, tensors: Tensors, name: str = "") -> Any:
    """Replace every tensor of a tree by a name, and store it in `tensors` under that name."""
    # Numbered, because paths are ambiguous: key "a" then "b" reads like key "a/b".
    unique = f"{len(tensors)}{name}"
    if isinstance(tree, Tensor):
        # Copied, because safetensors rejects tensors that share memory. It also requires contiguous
        # ones, so the JSON keeps the layout, such as channels-last.
        kept = tree.detach().to("cpu", copy=True)
        tensors[unique] = kept.contiguous()
        return {"$tensor": unique, "stride": list(kept.stride())}
    if isinstance(tree, np.ndarray) and not tree.dtype.hasobject:
        tensors[unique] = torch.from_numpy(np.frombuffer(bytearray(tree.tobytes()), np.uint8))
        return {"$array": unique, "dtype": tree.dtype.str, "shape": list(tree.shape)}
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str | int):
                raise TypeError(f"{name}: a checkpoint cannot hold the key {key!r}")
        items = [[key, to_json(value, tensors, f"{name}/{key}")] for key, value in tree.items()]
        return {"$dict": items}
    if isinstance(tree, list | tuple):
        items = [to_json(value, tensors, f"{name}/{i}") for i, value in enumerate(tree)]
        return {"$tuple": items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{name}: a checkpoint cannot hold a {type(tree).__name__}")


def from_json(node: Any, tensors: Tensors) -> Any:
    """Rebuild the tree that `to_json` was given."""
    if isinstance(node, list):
        return [from_json(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        tensor, stride = tensors[node["$tensor"]], tuple(node["stride"])
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    if "$array" in node:
        return tensors[node["$array"]].numpy().view(node["dtype"]).reshape(node["shape"])
    if "$tuple" in node:
        return tuple(from_json(value, tensors) for value in node["$tuple"])
    return {key: from_json(value, tensors) for key, value in node["$dict"]}
