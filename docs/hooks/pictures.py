"""Draws the pictures of the pages while the site is built, so that none lies in the repository."""

import io
from typing import Any

import numpy as np
from mkdocs.structure.files import File, Files
from PIL import Image

from steppe.domains import Dataset, load

SCALE = 3
COLUMNS = 16


def on_files(files: Files, /, *, config: Any) -> Files:
    picture = contact_sheet(load("Doodles"))
    files.append(File.generated(config, "assets/doodles.png", content=picture))
    return files


def contact_sheet(dataset: Dataset) -> bytes:
    """One row of images for each domain, an equal number of each class."""
    each = COLUMNS // len(dataset.classes)
    rows = []
    for domain in dataset.domains:
        labels = range(len(dataset.classes))
        chosen = np.concatenate([np.flatnonzero(domain.labels == y)[:each] for y in labels])
        rows.append(np.concatenate([domain.images[int(i)] for i in chosen], axis=1))
    sheet = Image.fromarray(np.concatenate(rows))
    file = io.BytesIO()
    size = (sheet.width * SCALE, sheet.height * SCALE)
    sheet.resize(size, Image.Resampling.NEAREST).save(file, format="PNG")
    return file.getvalue()
