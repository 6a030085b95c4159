"""RotatedDigits: scikit-learn's handwritten digits, 8 x 8 pixels, at RotatedMNIST's six angles.

Needs no download. Made as RotatedMNIST is: shuffled once, and each digit at one angle only.
"""

from __future__ import annotations

import numpy as np
from numpy.random import RandomState

from . import mnist
from .dataset import Domain

ANGLES = mnist.ANGLES
CLASSES = mnist.DIGITS


def read() -> tuple[tuple[str, ...], tuple[Domain, ...]]:
    """The classes and the domains, one for each angle."""
    from sklearn.datasets import load_digits  # slow to import, and naming datasets does not need it

    bunch = load_digits()
    order = RandomState(0).permutation(len(bunch.target))
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # they come as 0 to 16
    return CLASSES, mnist.at_angles(images[order], bunch.target.astype(np.int64)[order])
