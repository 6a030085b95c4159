"""TerraIncognita from the CCT-20 archives, with images sorted into ``location_N/category``.

The archives contain one folder with the images of twenty cameras, and JSON files with their
annotations. DomainBed uses four cameras and ten categories.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from steppe.domains.folder import reader
from steppe.domains.spec import DatasetSpec, Source, same_file
from steppe.errors import UserError, reason
from steppe.strangers import parse, read

LOCATIONS = ("100", "38", "43", "46")
CATEGORIES = (
    "bird",
    "bobcat",
    "cat",
    "coyote",
    "dog",
    "empty",
    "opossum",
    "rabbit",
    "raccoon",
    "squirrel",
)


def places(annotations: Iterable[Any]) -> dict[str, set[str]]:
    """Map each image's file name to its folders, such as ``location_38/dog``.

    As in DomainBed, an image that shows two categories belongs to both.
    """
    where: dict[str, set[str]] = defaultdict(set)
    for part in annotations:
        names = {category["id"]: category["name"] for category in part["categories"]}
        images = {
            image["id"]: image for image in part["images"] if str(image["location"]) in LOCATIONS
        }
        for annotation in part["annotations"]:
            image = images.get(annotation["image_id"])
            category = names[annotation["category_id"]]
            if image is not None and category in CATEGORIES:
                where[image["file_name"]].add(f"location_{image['location']}/{category}")
    return where


def arrange(unpacked: Path) -> Path:
    """Sort the images of the unpacked archives into a new folder inside `unpacked`; return it."""
    files = list(unpacked.rglob("*_annotations.json"))
    if not files:
        raise UserError(f"found no *_annotations.json among the files unpacked in {unpacked}")
    try:
        where = places(parse(read(file)) for file in files)
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"the annotations unpacked in {files[0].parent} are not those of CCT-20: "
            f"{reason(error)}"
        ) from None
    images = {path.name: path for path in unpacked.rglob("*.jpg")}
    missing = sorted(where.keys() - images.keys())
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(where)} annotated images are missing, such as "
            f"{missing[0]}: the two archives do not match"
        )
    arranged = unpacked / "arranged"
    for name, folders in where.items():
        for folder in folders:
            (arranged / folder).mkdir(parents=True, exist_ok=True)
        first, *others = sorted(folders)
        for folder in others:
            shutil.copyfile(images[name], arranged / folder / name)
        os.replace(images[name], arranged / first / name)
    return arranged


_DOMAINS = tuple(f"location_{number}" for number in LOCATIONS)
# LILA has the same files in three clouds.
_LILA = (
    "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/",
    "https://lilawildlife.blob.core.windows.net/lila-wildlife/caltechcameratraps/",
    "http://us-west-2.opendata.source.coop.s3.amazonaws.com/agentmorris/lila-wildlife/"
    "caltechcameratraps/",
)

TERRA_INCOGNITA = DatasetSpec(
    name="TerraIncognita",
    domains=_DOMAINS,
    labels=tuple(f"L{number}" for number in LOCATIONS),
    n_classes=len(CATEGORIES),
    citation="Beery et al., Recognition in Terra Incognita, ECCV 2018",
    read=reader("TerraIncognita", _DOMAINS),
    folder="terra_incognita",
    counts=(4879, 9767, 4020, 6122),
    source=Source(
        downloads=(
            same_file("eccv_18_annotations.tar.gz", "md5:66a1f481b44aa1edadf75c9cfbd27aba", *_LILA),
            same_file(
                "eccv_18_all_images_sm.tar.gz", "md5:8143c17aa2a12872b66f284ff211531f", *_LILA
            ),
        ),
        elsewhere=("https://lila.science/datasets/caltech-camera-traps (CCT20 benchmark subset)",),
        arrange=arrange,
    ),
)
