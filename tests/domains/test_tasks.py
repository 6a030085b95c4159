"""The advisor's tasks: the same bytes for everyone, and nothing shared by sources and target."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from steppe.domains import Dataset, load
from steppe.domains.datasets.mnist import rotate

GOLDEN = "e5b1f83d9269736f50659ebb0edbe5464035a74e4c19cace2b9dfad06eecdde2"
"""The checksum of all pixels and labels: records of runs are worthless if they change."""


@pytest.fixture(scope="module")
def tasks(plugin) -> dict[str, Dataset]:
    return {task.name: load(task.name) for task in plugin.TASKS}


def test_every_family_is_there_in_every_variant(plugin):
    families = {task.family for task in plugin.TASKS}
    assert len(families) == 11
    assert len({task.base for task in plugin.TASKS}) == 5
    assert [task.name for task in plugin.TASKS] == [
        f"{name}-{variant}" for name in plugin.FAMILIES for variant in plugin.VARIANTS
    ]
    assert len(plugin.TASKS) == 44


def test_the_images_are_as_declared_and_none_is_there_twice(plugin, tasks):
    for task in plugin.TASKS:
        data = tasks[task.name]
        spec = data.spec
        assert tuple(domain.name for domain in data.domains) == spec.domains
        assert len(data.domains) == 4
        assert spec.domains[-1] == task.target
        assert tuple(len(domain) for domain in data.domains) == spec.counts
        assert len(data.classes) == spec.n_classes
        for domain in data.domains:
            shape = (len(domain), spec.image_size, spec.image_size, spec.channels)
            assert domain.images.pixels.shape == shape
            assert domain.images.pixels.dtype == np.uint8
            occurs = np.bincount(domain.labels, minlength=spec.n_classes)
            assert len(occurs) == spec.n_classes
            assert occurs.min() >= 1
            if task.variant != "noisy":
                assert occurs.max() - occurs.min() <= 1
        pixels = {image.tobytes() for domain in data.domains for image in domain.images.pixels}
        assert len(pixels) == sum(spec.counts), task


def test_a_quarter_of_the_labels_is_wrong_in_the_sources_only(plugin, tasks):
    for name in plugin.FAMILIES:
        plain, noisy = tasks[f"{name}-plain"].domains, tasks[f"{name}-noisy"].domains
        for right, domain in zip(plain, noisy, strict=True):
            assert np.array_equal(right.images.pixels, domain.images.pixels)
            wrong = (right.labels != domain.labels).mean()
            assert wrong == (0 if domain is noisy[-1] else 0.25)


def test_the_images_never_change(tasks):
    # Another processor may round the last bit of a sine differently, but a value would have to lie
    # within 1e-13 of the middle between two bytes for that to be seen.
    digest = hashlib.sha256()
    for data in tasks.values():
        for domain in data.domains:
            digest.update(domain.images.pixels.tobytes())
            digest.update(domain.labels.astype("<i8").tobytes())
    assert digest.hexdigest() == GOLDEN


def test_every_digit_is_in_one_domain(plugin):
    largest = plugin.VARIANTS["narrow"]
    seen = [
        plugin.digits._digits(np.arange(count) % 4, domain).tobytes()
        for domain, count in enumerate([largest.per_source] * 3 + [largest.per_target])
    ]
    digits = [domain[i : i + 512] for domain in seen for i in range(0, len(domain), 512)]
    assert len(set(digits)) == len(digits) == 680  # 64 pixels of 8 bytes each


def test_digits_turn_as_those_of_the_benchmarks(plugin):
    images = np.random.RandomState(0).randint(256, size=(5, 8, 8)).astype(np.uint8)
    turned = plugin.digits._rotate(images / 255, np.zeros(5), None, degrees=20)
    difference = 255 * turned - rotate(images, 20)
    assert abs(difference[:, 2:-2, 2:-2]).max() < 2  # Pillow rounds, and treats borders differently


def test_a_caller_may_change_what_it_got(plugin):
    first = plugin.TASKS[0].read()[1][0]
    kept = first.images.pixels.copy()
    first.images.pixels[:], first.labels[:] = 0, 0
    again = plugin.TASKS[0].read()[1][0]
    assert np.array_equal(again.images.pixels, kept)
    assert again.labels.any()


def test_only_the_plugin_registers_them():
    code = """
from steppe.domains import dataset_names, import_plugins
assert len(dataset_names()) == 10, dataset_names()
import_plugins(["steppe.domains.tasks"])
assert len(dataset_names()) == 54, dataset_names()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
