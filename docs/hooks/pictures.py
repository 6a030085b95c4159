"""Draws the pictures of the pages while the site is built, so that none lies in the repository."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mkdocs.structure.files import File, Files
from PIL import Image

from steppe.domains import Dataset, load
from steppe.measure import Settings, measure_run
from steppe.reports import compare, draw, load_runs
from steppe.training import make_config, train

SCALE = 3
COLUMNS = 16


def on_files(files: Files, /, *, config: Any) -> Files:
    pictures = {"doodles.png": contact_sheet(load("Doodles")), "spectra.svg": spectra()}
    for name, content in pictures.items():
        files.append(File.generated(config, f"assets/{name}", content=content))
    return files


def spectra() -> bytes:
    """The figure of `steppe curvature compare`, of four short runs."""
    torch.set_num_threads(1)  # so small a network is no faster with more
    with tempfile.TemporaryDirectory() as home:
        for optimizer in ("sgd", "fad"):
            for seed in (0, 1):
                values = {"dataset": "RotatedDigits", "targets": "75", "steps": 51}
                chosen = {"optimizer": optimizer, "seed": seed, "trial_seed": seed}
                run = Path(home) / f"{optimizer}-{seed}"
                train(make_config({**values, **chosen, "device": "cpu"}), run)
                measure_run(run, Settings(top=20, images=100, trace_rtol=0.05), device="cpu")
        figure = Path(home) / "spectra.svg"
        draw(compare(load_runs([Path(home)]).runs), figure)
        return figure.read_bytes()


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
