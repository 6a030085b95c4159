"""The datasets that are known, and where each was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from steppe import console

from . import pack
from .catalog import dataset_names, dataset_spec


class Found(TypedDict):
    name: str
    domains: tuple[str, ...]
    classes: int
    images: int | None
    steps: int
    found: str | None
    packed: str | None
    citation: str


def find_all(home: Path) -> list[Found]:
    """Every known dataset, with where it was found; no image is looked at."""
    return [_find(name, home) for name in dataset_names()]


def _find(name: str, home: Path) -> Found:
    spec = dataset_spec(name)
    packed = pack.present(spec, home) if spec.folder else None
    found = str(spec.where(home)) if spec.where(home).is_dir() else None
    return {
        "name": spec.name,
        "domains": spec.domains,
        "classes": spec.n_classes,
        "images": sum(spec.counts) if spec.counts else None,
        "steps": spec.steps,
        "found": found if spec.folder else "in memory",
        "packed": str(packed) if packed else None,
        "citation": spec.citation,
    }


def table(rows: Sequence[Found]) -> console.Table:
    headings = ("dataset", "domains", "classes", "images", "steps", "found")
    cells = (
        (
            row["name"],
            ", ".join(row["domains"]),
            row["classes"],
            f"{row['images']:,}" if row["images"] else "?",
            f"{row['steps']:,}",
            _where(row),
        )
        for row in rows
    )
    return console.table(headings, cells, labels=2)


def _where(row: Found) -> str:
    if row["packed"]:
        return "packed"
    return "in memory" if row["found"] == "in memory" else "yes" if row["found"] else "no"
