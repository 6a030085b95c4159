"""Text embeddings of the classes as a classifier, which makes CLIP a zero-shot model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import Network
from steppe.algorithms.network import SCALE
from steppe.errors import UserError, shown

from .weights import read_tensors

Embeddings = Mapping[str, Tensor] | Tensor
"""A vector per class name, or a matrix with a row per class."""


def read_embeddings(path: Path) -> Embeddings:
    """Read text embeddings.

    A safetensors or torch file holds a vector for each class, under the class's name. An ``.npy``
    file, or a tensor in a torch file, is a matrix of classes x dimensions.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    where = f"class_embeddings {path}"
    found: object
    if path.suffix == ".npy":
        try:
            found = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{where} cannot be read: {error}") from None
    else:
        found = read_tensors(path, "class_embeddings")
    if isinstance(found, Mapping) and found:
        if all(isinstance(one, Tensor) and one.dim() == 1 for one in found.values()):
            named = {str(name): one.float() for name, one in found.items()}
            if len(sizes := {len(one) for one in named.values()}) == 1:
                return named
            raise UserError(f"{where} holds vectors of different lengths: {sorted(sizes)}")
    elif isinstance(found, Tensor) and found.dim() == 2:
        return found.float()
    raise UserError(
        f"{where} holds neither a vector per class name nor a matrix of classes x dimensions"
    )


def embedding_size(path: Path) -> int:
    """The number of dimensions of a file's embeddings."""
    found = read_embeddings(path)
    first = found if isinstance(found, Tensor) else next(iter(found.values()))
    return first.shape[-1]


def of_classes(embeddings: Embeddings, classes: Sequence[str], path: Path) -> Tensor:
    """The matrix of the embeddings of some classes, in their order.

    Raises:
        UserError: a class has none, or the number of rows of a matrix is not that of the classes.
    """
    if isinstance(embeddings, Tensor):
        if len(embeddings) != len(classes):
            raise UserError(
                f"class_embeddings {path} has {len(embeddings)} rows, but there are "
                f"{len(classes)} classes: {shown(', '.join(classes))}"
            )
        matrix = embeddings
    else:
        for name in classes:
            if name not in embeddings:
                close = difflib.get_close_matches(name, embeddings, n=1)
                hint = f" (it has {close[0]!r})" if close else ""
                raise UserError(
                    f"class_embeddings {path} has no embedding of the class {name!r}{hint}: name "
                    "each vector as the dataset names its class"
                )
        matrix = torch.stack([embeddings[name] for name in classes])
    norms = matrix.norm(dim=1)
    for name, norm in zip(classes, norms, strict=True):
        if not 0 < norm < torch.inf:
            raise UserError(f"class_embeddings {path}: the embedding of {name!r} has norm {norm}")
    return matrix


@torch.no_grad()
def set_classifier(network: Network, embeddings: Tensor) -> None:
    r"""Make the logits \(100 \cos(f, t_c)\), with \(f\) an image's features."""
    classifier = network.classifier
    classifier.weight.copy_(SCALE * F.normalize(embeddings.to(classifier.weight)))
    classifier.bias.zero_()


def load_classifier(network: Network, path: Path, classes: Sequence[str]) -> None:
    """Load the embeddings of the classes from a file as the network's classifier."""
    matrix = of_classes(read_embeddings(path), classes, path)
    if matrix.shape[1] != network.n_features:
        raise UserError(
            f"class_embeddings {path} has {matrix.shape[1]} dimensions, but the backbone gives "
            f"{network.n_features} features"
        )
    set_classifier(network, matrix)
