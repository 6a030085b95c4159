"""RotatedDigits: scikit-learn's handwritten digits, 8 x 8 pixels, at RotatedMNIST's six angles.

It needs no download. As in RotatedMNIST, the digits are shuffled once, and each one appears at one
angle only.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Contents
from steppe.domains.spec import DatasetSpec

from .mnist import ANGLES, DIGITS, at_angles


def read(root: Path | None = None) -> Contents:
    return copy.deepcopy(_rotated())  # so that callers may modify it


@cache  # rotating takes longer than hundreds of training steps
def _rotated() -> Contents:
    from sklearn.datasets import load_digits  # slow to import, and naming datasets does not need it

    bunch = load_digits()
    order = RandomState(0).permutation(len(bunch.target))
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # values are 0 to 16
    return DIGITS, at_angles(images[order], bunch.target.astype(np.int64)[order])


ROTATED_DIGITS = DatasetSpec(
    name="RotatedDigits",
    domains=ANGLES,
    labels=tuple(f"{angle}°" for angle in ANGLES),
    n_classes=10,
    citation="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 "
    "(as in scikit-learn)",
    read=read,
    counts=(300, 300, 300, 299, 299, 299),
    steps=301,
    checkpoint_every=50,
    validate_every=10,
    image_size=8,
    channels=1,
    augment=False,
    backbone="small-cnn",
    pretrained=False,
)
