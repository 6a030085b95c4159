"""Datasets with named domains: records, images, splits, batches.

The names below are the public ones; the modules beside this file hold one idea each.
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
from .spec import DatasetSpec
from .splits import Split, seed_hash, split_dataset, split_indices

__all__ = [
    "Arrays",
    "Dataset",
    "DatasetSpec",
    "Domain",
    "Files",
    "Images",
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
