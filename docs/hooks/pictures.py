"""Draws the pictures of the pages while the site is built, so that none lies in the repository."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files
from PIL import Image

from steppe.domains import Dataset, load
from steppe.measure import Settings, measure_run
from steppe.reports import build_report, compare, draw, load_runs, write
from steppe.training import load_model, make_config, train

SCALE = 3
COLUMNS = 16


def on_files(files: Files, /, *, config: Any) -> Files:
    doodles = load("Doodles")
    pictures = {
        "doodles.png": contact_sheet(doodles),
        "predictions.png": predictions(doodles),
        **of_runs(),
    }
    for name, content in pictures.items():
        files.append(File.generated(config, f"assets/{name}", content=content))
    return files


def of_runs() -> dict[str, bytes]:
    """What `steppe curvature compare` and `steppe report` make of four short runs."""
    torch.set_num_threads(1)  # so small a network is no faster with more
    with tempfile.TemporaryDirectory() as home:
        for optimizer in ("sgd", "fad"):
            for seed in (0, 1):
                values = {"dataset": "RotatedDigits", "targets": "75", "steps": 51}
                chosen = {"optimizer": optimizer, "seed": seed, "trial_seed": seed}
                run = Path(home) / f"{optimizer}-{seed}"
                train(make_config({**values, **chosen, "device": "cpu"}), run)
                measure_run(run, Settings(top=20, images=100, trace_rtol=0.05), device="cpu")
        loaded = load_runs([Path(home)])
        figure = Path(home) / "spectra.svg"
        draw(compare(loaded.runs), figure)
        page = write(build_report(loaded), "html")
        return {"spectra.svg": figure.read_bytes(), "report.html": page.encode()}


def predictions(dataset: Dataset) -> bytes:
    """One image of each class of the held-out domain, with what a short run predicts."""
    torch.set_num_threads(1)
    values = {"dataset": "Doodles", "targets": "sketch", "optimizer": "fad", "steps": 101}
    with tempfile.TemporaryDirectory() as home:
        train(make_config({**values, "device": "cpu"}), home)
        model = load_model(home)
    domain = next(domain for domain in dataset.domains if domain.name == "sketch")
    chosen = [int(np.flatnonzero(domain.labels == y)[0]) for y in range(len(dataset.classes))]
    images = [domain.images[i] for i in chosen]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    with torch.no_grad():
        probability, label = model(pixels).softmax(1).max(1)
    figure = Figure(figsize=(8, 1.5), layout="constrained")
    for axes, image, p, y in zip(
        np.atleast_1d(figure.subplots(1, len(images))), images, probability, label, strict=True
    ):
        axes.imshow(image)
        axes.set_axis_off()
        axes.set_title(f"{model.classes[int(y)]}\n{float(p):.0%}", fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


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
