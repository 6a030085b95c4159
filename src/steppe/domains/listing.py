"""The table of ``steppe data list``: every registered dataset, and where it was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steppe import console

from . import pack
from .catalog import DATASETS


def find_all(home: Path) -> list[dict[str, Any]]:
    """Describe every registered dataset and its location, without reading images."""
    rows = []
    for spec in DATASETS.entries():
        packed, folder = pack.present(spec, home), spec.where(home)
        found = str(folder) if folder.is_dir() else None
        rows.append(
            {
                "name": spec.name,
                "domains": spec.domains,
                "classes": spec.n_classes,
                "images": sum(spec.counts) if spec.counts else None,
                "steps": spec.steps,
                "found": found if spec.folder else "in memory",
                "packed": str(packed) if packed else None,
                "citation": spec.citation,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> console.Table:
    headings = ("dataset", "domains", "classes", "images", "steps", "found")
    cells = []
    for row in rows:
        where = "packed" if row["packed"] else "yes" if row["found"] else "no"
        where = "in memory" if row["found"] == "in memory" else where
        images = f"{row['images']:,}" if row["images"] else "?"
        domains, steps = ", ".join(row["domains"]), f"{row['steps']:,}"
        cells.append((row["name"], domains, row["classes"], images, steps, where))
    return console.table(headings, cells, labels=2)
