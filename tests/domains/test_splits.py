"""Splits: DomainBed's to the index, the appendix's, and official ones."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from steppe.domains import (
    Arrays,
    Dataset,
    DatasetSpec,
    Domain,
    Files,
    dataset_spec,
    seed_hash,
    split_dataset,
    split_indices,
)
from steppe.domains.datasets import nico
from steppe.errors import UserError

PACS_COUNTS = (2048, 2344, 1670, 3929)


def make(spec: DatasetSpec, counts: tuple[int, ...], official: bool = False) -> Dataset:
    """A dataset with these many images in each domain, all of them black."""
    domains = []
    for name, n in zip(spec.domains, counts, strict=True):
        subsets = {}
        if official:
            parts = np.array_split(np.arange(n), 3)
            subsets = dict(zip(("train", "val", "test"), parts, strict=True))
        images = Arrays(np.zeros((n, 1, 1, 3), dtype=np.uint8))
        domains.append(Domain(name, images, np.zeros(n, dtype=np.int64), subsets))
    return Dataset(spec, ("a",), tuple(domains), "memory")


def domainbed(n: int, holdout: float, trial_seed: int, position: int) -> tuple[list, list]:
    """The definition in words of code: (in, out) of one environment."""
    digest = hashlib.md5(f"({trial_seed}, {position})".encode()).hexdigest()
    keys = list(range(n))
    np.random.RandomState(int(digest, 16) % 2**31).shuffle(keys)
    return keys[int(n * holdout) :], keys[: int(n * holdout)]


def test_seed_hash_is_domainbeds():
    assert seed_hash(0, 0) == 894182419
    assert seed_hash("a", 1) == int(hashlib.md5(b"('a', 1)").hexdigest(), 16) % 2**31


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 99, 1670])
def test_a_fifth_is_held_out_and_nothing_is_lost(n: int):
    larger, held_out = split_indices(n, 0.2, seed_hash(0, 0))
    assert len(held_out) == int(0.2 * n)
    assert sorted([*larger, *held_out]) == list(range(n))


# The sha256 of all indices of a trial, domain by domain, ``in`` before ``out``, as little-endian
# 64-bit integers: what DomainBed's definition gives with NumPy's frozen RandomState.
PACS_SPLITS = {
    0: "055e5c6aec9d8c4d2e0ec83e91137796539ab826341ddc1aa4765398c50b40e8",
    1: "721273fc970087e925ceceba451a571bfb8fa81321be9b78f9950325c3478ed8",
    2: "7a56fb6fe7cb91c887faa70132e73c6668e2ab3ac2998272745fdcc083d1934c",
}


@pytest.mark.parametrize("trial_seed", PACS_SPLITS)
def test_the_splits_of_pacs(trial_seed: int):
    dataset = make(dataset_spec("PACS"), PACS_COUNTS)
    splits = split_dataset(dataset, ["sketch"], trial_seed)
    ours, definition = hashlib.sha256(), hashlib.sha256()
    for position, (split, n) in enumerate(zip(splits, PACS_COUNTS, strict=True)):
        assert split.position == position
        assert list(split.parts) == (["test", "oracle"] if position == 3 else ["train", "val"])
        assert split.source == (position != 3)
        assert split.larger is split.parts["train" if split.source else "test"]
        for indices in split.parts.values():
            ours.update(indices.astype("<i8").tobytes())
        for keys in domainbed(n, 0.2, trial_seed, position):
            for key in keys:
                definition.update(struct.pack("<q", key))
    assert ours.hexdigest() == definition.hexdigest() == PACS_SPLITS[trial_seed]


def test_a_domains_split_does_not_depend_on_its_role():
    dataset = make(dataset_spec("VLCS"), (50, 60, 70, 80))
    for targets in (["SUN09"], ["Caltech101", "VOC2007"]):
        for split in split_dataset(dataset, targets, trial_seed=1):
            expected = domainbed(len(split.domain), 0.2, 1, split.position)
            assert [part.tolist() for part in split.parts.values()] == list(expected)


def test_sources_narrow_the_training_domains_and_keep_their_numbers():
    dataset = make(dataset_spec("PACS"), (10, 20, 30, 40))
    splits = split_dataset(dataset, ["cartoon"], 0, sources=["sketch"])
    assert [(s.domain.name, s.position, s.source) for s in splits] == [
        ("cartoon", 1, False),
        ("sketch", 3, True),
    ]
    assert splits[1].larger.tolist() == domainbed(40, 0.2, 0, 3)[0]


@pytest.mark.parametrize(
    ("targets", "sources", "kind", "message"),
    [
        (["sketches"], [], "domainbed", "PACS has no domain 'sketches'; its domains: art_painting"),
        (["sketch"], ["pohto"], "domainbed", "PACS has no domain 'pohto'"),
        (["sketch"], ["photo", "sketch"], "domainbed", "'sketch' is both a source and a target"),
        (["art_painting", "cartoon", "photo", "sketch"], [], "domainbed", "none is left to train"),
        (["sketch"], [], "random", "unknown split 'random'. Known: domainbed, appendix"),
    ],
)
def test_what_cannot_be_split_is_refused(targets, sources, kind, message):
    with pytest.raises(UserError, match=message):
        split_dataset(make(dataset_spec("PACS"), (9, 9, 9, 9)), targets, 0, kind, sources)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_a_tiny_domain_splits_or_is_refused_by_name(n: int):
    dataset = make(dataset_spec("PACS"), (10, 10, n, 10))
    if n == 0:
        with pytest.raises(UserError, match="'photo' has 0 images, so none is left for training"):
            split_dataset(dataset, ["sketch"], 0)
        with pytest.raises(UserError, match="none is left for testing"):
            split_dataset(dataset, ["photo"], 0)
    else:
        photo = split_dataset(dataset, ["sketch"], 0)[2]
        assert sorted(photo.larger) == list(range(n))
        assert photo.parts["val"].tolist() == []
        assert photo.parts["val"].dtype == np.int64  # an empty one still selects


def test_the_appendix_holds_out_more_of_vlcs_and_the_same_of_others():
    for name, holdout in (("VLCS", 0.3), ("OfficeHome", 0.2)):
        spec = dataset_spec(name)
        dataset = make(spec, (51, 52, 53, 54))
        for split in split_dataset(dataset, [spec.domains[0]], 2, "appendix"):
            expected = domainbed(len(split.domain), holdout, 2, split.position)
            assert [part.tolist() for part in split.parts.values()] == list(expected)


def pacs_of_files() -> Dataset:
    spec = dataset_spec("PACS")
    image_names = [f"dog/{k}.jpg" for k in range(10)]
    domains = (
        Domain(name, Files(Path(name), image_names), np.zeros(10, dtype=np.int64))
        for name in spec.domains
    )
    return Dataset(spec, ("dog",), tuple(domains), "memory")


@pytest.mark.parametrize("place", [".", "splits"])
def test_the_appendix_takes_the_official_lists_of_pacs(tmp_path: Path, place: str):
    parts = {"train": [9, 0, 4], "crossval": [2, 7]}
    (tmp_path / place).mkdir(exist_ok=True)
    for domain in dataset_spec("PACS").domains:
        for part, chosen in parts.items():
            lines = "".join(f"{domain}/dog/{k}.jpg 1\n" for k in chosen)
            (tmp_path / place / f"{domain}_{part}_kfold.txt").write_text(f"{lines}\n")
    for split in split_dataset(pacs_of_files(), ["photo"], 0, "appendix", root=tmp_path):
        larger = parts["train"] if split.source else list(range(10))  # targets: all their images
        assert split.larger.tolist() == larger
        assert split.parts["val" if split.source else "oracle"].tolist() == parts["crossval"]

    (tmp_path / place / "photo_train_kfold.txt").write_text("photo/dog/77.jpg 1\n")
    with pytest.raises(UserError, match=r"photo_train_kfold.txt lists 'dog/77.jpg'"):
        split_dataset(pacs_of_files(), ["photo"], 0, "appendix", root=tmp_path)


def test_the_appendix_without_the_lists_of_pacs(tmp_path: Path):
    with pytest.raises(UserError, match="art_painting_train_kfold.txt is missing.*domainbed"):
        split_dataset(pacs_of_files(), ["photo"], 0, "appendix", root=tmp_path)


@pytest.mark.parametrize("kind", ["domainbed", "appendix"])
@pytest.mark.parametrize("trial_seed", [0, 1])
def test_official_subsets_replace_the_random_split(kind: str, trial_seed: int):
    dataset = make(dataset_spec("NICO++"), (30,) * 6, official=True)
    splits = split_dataset(dataset, ["autumn", "rock"], trial_seed, kind)
    assert [split.domain.name for split in splits] == list(nico.DOMAINS)
    for split in splits:
        if split.domain.name in ("autumn", "rock"):
            assert split.parts["test"].tolist() == list(range(20, 30))
            assert split.parts["oracle"].tolist() == list(range(10, 20))
        else:
            assert split.parts["train"].tolist() == list(range(10))
            assert split.parts["val"].tolist() == list(range(10, 20))
