"""RotatedDigits: scikit-learn's digits, turned as DomainBed turns MNIST."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from steppe.domains.datasets import digits


def test_every_digit_is_in_one_domain_turned_as_torchvision_turns_it():
    bunch = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    classes, domains = digits.read()
    assert classes == tuple("0123456789")
    assert [domain.name for domain in domains] == ["0", "15", "30", "45", "60", "75"]
    for i, domain in enumerate(domains):
        chosen = order[i::6]
        assert domain.labels.tolist() == bunch.target[chosen].tolist()
        for k, original in enumerate(chosen):
            flat = Image.fromarray(np.rint(bunch.images[original] * 255 / 16).astype(np.uint8))
            turned = rotate(flat, int(domain.name), InterpolationMode.BILINEAR, fill=[0])
            assert np.array_equal(domain.images[k][..., 0], turned)


def test_nothing_depends_on_the_global_generator():
    np.random.seed(1)
    once = digits.read()[1]
    np.random.seed(2)
    for a, b in zip(once, digits.read()[1], strict=True):
        assert np.array_equal(a.images.pixels, b.images.pixels)
        assert np.array_equal(a.labels, b.labels)
