"""Datasets with named domains: facts, images, splits, batches.

Importing these names imports neither torch nor Pillow: commands that only read records need a
dataset's facts, not its images.
"""

from .catalog import (
    data_folder,
    dataset_names,
    dataset_spec,
    import_plugins,
    load,
    register_dataset,
)
from .dataset import Arrays, Dataset, Domain, Files, Images, UnreadableImage
from .spec import DatasetSpec, Download, Mirror, Source
from .splits import Split, seed_hash, split_dataset, split_indices

__all__ = [
    "Arrays",
    "Dataset",
    "DatasetSpec",
    "Domain",
    "Download",
    "Files",
    "Images",
    "Mirror",
    "Source",
    "Split",
    "UnreadableImage",
    "data_folder",
    "dataset_names",
    "dataset_spec",
    "import_plugins",
    "load",
    "register_dataset",
    "seed_hash",
    "split_dataset",
    "split_indices",
]
