"""Images for benchmarks."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three domains of small images."""
    rng = np.random.default_rng(0)
    for domain in ("ink", "oil", "pen"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(256, size=(20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "images"
