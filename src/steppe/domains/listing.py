"""The datasets that are known, and where each was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from . import pack
from .catalog import dataset_names, dataset_spec


@dataclass(frozen=True)
class Row:
    """What a list says about one dataset."""

    name: str
    domains: tuple[str, ...]
    classes: int
    images: int | None
    steps: int
    found: str | None
    packed: str | None
    citation: str

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def find_all(home: Path) -> list[Row]:
    """Every known dataset, with where it was found; no image is looked at."""
    rows = []
    for spec in map(dataset_spec, dataset_names()):
        found = packed = None
        if spec.folder is None:
            found = "in memory"
        else:
            folder, pack_folder = home / spec.folder, pack.present(spec, home)
            found = str(folder) if folder.is_dir() else None
            packed = str(pack_folder) if pack_folder is not None else None
        images = sum(spec.counts) if spec.counts else None
        rows.append(
            Row(
                spec.name,
                spec.domains,
                spec.n_classes,
                images,
                spec.steps,
                found,
                packed,
                spec.citation,
            )
        )
    return rows


def table(rows: list[Row]) -> Table:
    """The list for the terminal."""
    grid = Table()
    grid.add_column("dataset", no_wrap=True)
    grid.add_column("domains")
    for heading in ("classes", "images", "steps"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("found", no_wrap=True)
    for row in rows:
        where = "in memory" if row.found == "in memory" else "yes" if row.found else "no"
        if row.packed:
            where = "packed"
        images = f"{row.images:,}" if row.images else "?"
        numbers = (str(row.classes), images, f"{row.steps:,}")
        grid.add_row(row.name, ", ".join(row.domains), *numbers, where)
    return grid
