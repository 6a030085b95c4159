"""Nested state as JSON and named tensors: what a checkpoint is made of, without pickle.

Dictionaries, lists, tuples and plain values become JSON; tensors go beside it under a name. Reading
gives back the same types, keys that are numbers included, and the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def to_json(tree: Any, tensors: Tensors, name: str = "") -> Any:
    """The tree with every tensor replaced by its name, and put into `tensors`."""
    # Numbered, because paths are ambiguous: the keys "a" then "b", and the key "a/b".
    unique = f"{len(tensors)}{name}"
    if isinstance(tree, Tensor):
        # A copy of its own, because safetensors refuses tensors that share memory. It also wants
        # them contiguous: the layout (channels-last, say) is kept beside them.
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
    """The tree that `to_json` was given."""
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
