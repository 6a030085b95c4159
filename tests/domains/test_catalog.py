"""The records of the datasets, and the ways to name one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steppe.domains import (
    Arrays,
    DatasetSpec,
    Domain,
    Source,
    catalog,
    dataset_names,
    dataset_spec,
    load,
    register_dataset,
)
from steppe.domains.get import get
from steppe.errors import UserError
from steppe.registry import Registry

ALL = [dataset_spec(name) for name in dataset_names()]
BUILT_IN = ["RotatedDigits", "Doodles"]
# DomainBed's table: folders, labels, classes, steps, checkpoint interval.
BENCHMARKS = {
    "PACS": ("PACS", "A C P S", 7, 5001, 300),
    "VLCS": ("VLCS", "C L S V", 5, 5001, 300),
    "OfficeHome": ("office_home", "A C P R", 65, 5001, 300),
    "TerraIncognita": ("terra_incognita", "L100 L38 L43 L46", 10, 5001, 300),
    "DomainNet": ("domain_net", "clip info paint quick real sketch", 345, 15001, 1000),
    "NICO++": ("NICO++", "autumn dim grass outdoor rock water", 60, 10001, 300),
    "RotatedMNIST": ("MNIST", "0 15 30 45 60 75", 10, 5001, 100),
    "ColoredMNIST": ("MNIST", "+90% +80% -90%", 2, 5001, 100),
}


def records(spec: DatasetSpec) -> int:
    """How many records a run writes: at every checkpoint, and at the last step."""
    return sum(s % spec.checkpoint_every == 0 or s == spec.steps - 1 for s in range(spec.steps))


def test_the_datasets_of_the_paper_and_the_built_in_ones_are_there():
    assert {*BENCHMARKS, *BUILT_IN} <= set(dataset_names())


@pytest.mark.parametrize("spec", ALL, ids=dataset_names())
def test_a_record_is_consistent(spec: DatasetSpec):
    assert len(spec.labels) == len(spec.domains) == len(set(spec.domains))
    assert [spec.label(domain) for domain in spec.domains] == list(spec.labels)
    assert spec.counts is None or len(spec.counts) == len(spec.domains)
    assert spec.citation
    held_out = [domain for targets in spec.targets for domain in targets]
    assert sorted(held_out) == sorted(spec.domains)  # each domain is a target once


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_protocol(name: str):
    spec = dataset_spec(name)
    facts = (spec.folder, " ".join(spec.labels), spec.n_classes, spec.steps, spec.checkpoint_every)
    assert facts == BENCHMARKS[name]
    if name not in ("RotatedMNIST", "ColoredMNIST", "NICO++"):
        assert list(spec.domains) == sorted(spec.domains)  # DomainBed numbers sorted folders
    if (spec.steps, spec.checkpoint_every) == (5001, 300):
        assert records(spec) == 18


def test_counts_add_up_to_the_published_sizes():
    sizes = {
        "PACS": 9991,
        "VLCS": 10729,
        "OfficeHome": 15588,
        "TerraIncognita": 24788,
        "DomainNet": 586575,
        "RotatedMNIST": 70000,
        "ColoredMNIST": 70000,
    }
    assert {name: sum(dataset_spec(name).counts or ()) for name in sizes} == sizes


def test_targets():
    assert dataset_spec("PACS").targets == (
        ("art_painting",),
        ("cartoon",),
        ("photo",),
        ("sketch",),
    )
    assert dataset_spec("NICO++").targets == (
        ("autumn", "rock"),
        ("dim", "grass"),
        ("outdoor", "water"),
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_built_in_is_what_its_record_says(name: str, tmp_path: Path):
    dataset = load(name, tmp_path / "nowhere")
    spec = dataset.spec
    assert dataset.origin == "in memory"
    assert tuple(domain.name for domain in dataset.domains) == spec.domains
    assert tuple(len(domain) for domain in dataset.domains) == spec.counts
    assert len(dataset.classes) == spec.n_classes
    for domain in dataset.domains:
        assert set(domain.labels) == set(range(spec.n_classes))
        assert domain.images[0].shape == (spec.image_size, spec.image_size, spec.channels)
    assert dataset.fingerprint() == load(name).fingerprint()


@pytest.mark.parametrize("spec", ALL, ids=dataset_names())
def test_case_does_not_matter(spec: DatasetSpec):
    assert dataset_spec(spec.name.lower()) is dataset_spec(spec.name.upper()) is spec


@pytest.mark.parametrize(
    ("wrong", "right"), [("PASC", "PACS"), ("office-home", "OfficeHome"), ("nico", "NICO++")]
)
def test_an_unknown_name_gets_a_suggestion(wrong: str, right: str):
    with pytest.raises(UserError, match="unknown dataset") as error:
        dataset_spec(wrong)
    assert f"did you mean '{right}'?" in str(error.value)
    assert "DOMAIN/CLASS/IMAGE" in str(error.value)


def write_folder(root: Path) -> Path:
    for k, name in enumerate(("day/cat/1", "day/dog/1", "night/cat/1", "night/cat/2", ".x/cat/1")):
        path = root / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), (k, 0, 0)).save(path)
    return root


def test_any_folder_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = write_folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for name in (root, str(root), "mine"):
        dataset = load(name, root=tmp_path / "elsewhere")
        assert dataset.spec.name == str(root.resolve())
        assert dataset.spec.domains == dataset.spec.labels == ("day", "night")
        assert dataset.classes == ("cat", "dog")
        assert [domain.labels.tolist() for domain in dataset.domains] == [[0, 1], [0, 0]]
        assert dataset.domains[1].images[1][0, 0].tolist() == [3, 0, 0]


def test_a_folder_with_one_domain_is_refused(tmp_path: Path):
    (tmp_path / "day" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="has 1 domain: expected at least two folders"):
        dataset_spec(tmp_path)


def test_another_number_of_classes_is_refused(tmp_path: Path):
    for domain in dataset_spec("PACS").domains:
        write_folder(tmp_path / "PACS" / domain)
    with pytest.raises(UserError, match=r"'PACS' has 7 classes, but .* has 2: day, night"):
        load("PACS", tmp_path)


def test_the_data_folder_is_an_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path / "images"))
    assert catalog.data_folder() == tmp_path / "images"
    with pytest.raises(UserError, match="dataset 'PACS' not found at") as error:
        load("PACS")
    assert str(tmp_path / "images" / "PACS") in str(error.value)


def test_the_download_command_has_the_datasets_name_not_its_folders(tmp_path: Path):
    with pytest.raises(UserError, match="'steppe data get OfficeHome'"):
        load("OfficeHome", tmp_path)


def test_register_a_dataset_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalog, "DATASETS", Registry("dataset", lambda: catalog.BUILT_IN))
    asked = []

    @register_dataset("Mine", domains=["a", "b"], n_classes=1, folder="my_files", steps=7)
    def mine(root: Path):
        asked.append(root)
        images, labels = Arrays(np.zeros((3, 2, 2, 3), np.uint8)), np.zeros(3, np.int64)
        return ["only"], [Domain(name, images, labels) for name in "ab"]

    dataset = load("mine", tmp_path)
    assert asked == [tmp_path / "my_files"]
    assert dataset.classes == ("only",)
    assert dataset.spec is dataset_spec("MINE")
    assert (dataset.spec.steps, dataset.spec.labels) == (7, ("a", "b"))
    assert "Mine" in dataset_names()
    with pytest.raises(UserError, match="already"):
        register_dataset("pacs", domains=["a", "b"], n_classes=1)(mine)
    with pytest.raises(UserError, match="'stepz', did you mean 'steps'"):
        register_dataset("Wrong", domains=["a", "b"], n_classes=1, stepz=7)(mine)


def test_naming_datasets_needs_neither_torch_nor_pillow():
    code = (
        "import sys\n"
        "from steppe.domains import dataset_spec, listing, seed_hash\n"
        "dataset_spec('PACS'), seed_hash(0)\n"
        "print({'torch', 'torchvision', 'PIL', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_plugins_dataset_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalog, "DATASETS", Registry("dataset", lambda: catalog.BUILT_IN))
    source = Source(elsewhere=("https://example.org/mine",))
    register_dataset("Mine", domains=["a", "b"], n_classes=1, folder="mine", source=source)(print)
    with pytest.raises(UserError, match=r"(?s)Where else to look:\n  https://example.org/mine"):
        get(dataset_spec("mine"), tmp_path)
