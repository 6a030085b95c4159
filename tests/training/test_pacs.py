"""The real PACS: it passes its check, packs without loss, and can be learned from.

Needs its images: ``STEPPE_PACS=data/PACS pytest -m slow tests/training/test_pacs.py``, the folder
with ``art_painting`` and so on in it, or one with archives; skipped where there are none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steppe.domains import dataset_spec, load
from steppe.domains.archives import unpack
from tests.limits import seconds

pytestmark = pytest.mark.slow
SHARED = Path(__file__).parents[2].parent / "shared"
PACS = Path(os.environ.get("STEPPE_PACS", SHARED / "data/pacs"))
WEIGHTS = Path(os.environ.get("STEPPE_WEIGHTS", SHARED / "weights"))
LITE = WEIGHTS / "tf_efficientnet_lite0.safetensors"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with PACS in it."""
    archives = sorted(PACS.glob("*.tar"))
    if not archives and not (PACS / "photo").is_dir():
        pytest.skip("no PACS in $STEPPE_PACS")
    folder = tmp_path_factory.mktemp("data")
    if not archives:
        (folder / "PACS").symlink_to(PACS.resolve())
    for archive in archives:
        unpack(archive, folder)
    return folder


def steppe(*arguments: object) -> str:
    command = [sys.executable, "-m", "steppe", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(900))
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_it_passes_its_check_and_packs_without_loss(home: Path) -> None:
    report = json.loads(steppe("data", "check", "PACS", "--root", home, "--json"))
    counts = {domain["name"]: domain["images"] for domain in report["domains"]}
    spec = dataset_spec("PACS")
    assert counts == dict(zip(spec.domains, spec.counts or (), strict=True))
    steppe("data", "pack", "PACS", "--root", home)
    files, pack = load("PACS", home, packed=False), load("PACS", home)
    assert "pack in" in pack.origin
    assert pack.fingerprint() == files.fingerprint()
    assert pack.shrunk_to is None
    for a, b in zip(files.domains, pack.domains, strict=True):
        for i in range(0, len(a), 50):
            assert np.array_equal(a.images[i], b.images[i])


def test_two_domains_teach_a_third(home: Path, tmp_path: Path) -> None:
    """ERM for 80 steps: far above chance, which is one of seven classes, or the largest of them."""
    arguments = ["--dataset", "PACS", "--root", home, "--target", "cartoon"]
    arguments += ["--source", "art_painting", "--source", "photo", "--optimizer", "adam"]
    arguments += ["--steps", 80, "--set", "checkpoint_every=79", "--set", "batch_size=16"]
    if LITE.exists():
        arguments += ["--backbone", "tf_efficientnet_lite0", "--weights", LITE]
        arguments += ["--set", "optimizer.lr=3e-4", "--set", "image_size=128"]
    else:
        arguments += ["--backbone", "resnet18", "--weights", "none", "--set", "image_size=64"]
    record = json.loads(steppe("train", *arguments, "--out", tmp_path / "run", "--json"))
    labels = load("PACS", home).domains[1].labels
    chance = np.bincount(labels).max() / len(labels)
    accuracy = record["domains"]["cartoon"]["test"]["accuracy"]
    assert list(record["domains"]) == ["art_painting", "cartoon", "photo"]
    assert accuracy > (2.0 if LITE.exists() else 1.3) * chance
    print(f"cartoon {100 * accuracy:.1f} %, chance {100 * chance:.1f} %")
