"""Jigsaw puzzles: images with their 3 x 3 tiles in another order."""

import torch
from torch import Tensor

N_ORDERS = 31
"""The original order and 30 others."""
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow


def orders() -> Tensor:
    r"""Return the orders, one per row; the first leaves the tiles in place.

    They are maps \(t \mapsto at + b\) of the field with nine elements, which a 3 x 3 grid can
    represent. Two such maps agree in at most one place, so all orders are far apart.
    """

    def plus(x: int, y: int) -> int:
        return (x // 3 + y // 3) % 3 * 3 + (x + y) % 3

    def times(x: int, y: int) -> int:  # of complex numbers modulo 3
        (a, b), (c, d) = divmod(x, 3), divmod(y, 3)
        return (a * c - b * d) % 3 * 3 + (a * d + b * c) % 3

    rows = [[plus(times(a, t), b) for t in range(9)] for a in range(1, 9) for b in range(9)]
    original = list(range(9))
    others = [row for row in rows if row != original]
    return torch.tensor([original, *others[: N_ORDERS - 1]])


def shuffled(images: Tensor, sources: Tensor, gray: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Move tiles, after making some of them gray.

    If a side is not divisible by 3, the tiles cover the largest part of it that is, and the rest
    stays in place.

    Args:
        images: normalized images.
        sources: for each image and place, the tile that goes there, N x 9.
        gray: whether to make a tile gray, N x 9; images without colors ignore it.
        mean: subtracted per channel in normalization.
        std: divided by per channel in normalization.
    """
    height, width = (side // 3 for side in images.shape[2:])
    grid = images[:, :, : 3 * height, : 3 * width]
    tiles = grid.unflatten(3, (3, width)).unflatten(2, (3, height))
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # N x 9 x C x height x width
    if tiles.shape[2] == len(_LUMA):
        colors = (tiles * std + mean).split(1, 2)
        grays = torch.stack([w * c for w, c in zip(_LUMA, colors, strict=True)]).sum(0)
        tiles = torch.where(gray[:, :, None, None, None], (grays - mean) / std, tiles)
    rows = torch.arange(len(images), device=images.device)[:, None]
    moved = tiles[rows, sources].unflatten(1, (3, 3)).permute(0, 3, 1, 4, 2, 5)
    result = images.clone()
    result[:, :, : 3 * height, : 3 * width] = moved.reshape(grid.shape)
    return result
