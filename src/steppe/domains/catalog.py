"""The registry of datasets: steppe's own, and those that plugins add."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from steppe.errors import UserError, unknown
from steppe.registry import Registry

from . import folder
from .dataset import Contents, Dataset
from .datasets import BUILT_IN
from .spec import DatasetSpec

DATASETS: Registry[DatasetSpec] = Registry("dataset", lambda: BUILT_IN)


def dataset_names() -> tuple[str, ...]:
    """Return the names of all registered datasets.

    Examples:
        >>> dataset_names()[:3]
        ('PACS', 'VLCS', 'OfficeHome')
    """
    return tuple(DATASETS)


def dataset_spec(name: str | os.PathLike[str]) -> DatasetSpec:
    """Return the facts about a dataset, given its name or the path of a folder.

    Names ignore case. A folder must be laid out as `root/domain/class/image`.

    Examples:
        >>> dataset_spec("pacs").domains
        ('art_painting', 'cartoon', 'photo', 'sketch')
    """
    name = os.fspath(name)
    if name not in DATASETS and Path(name).is_dir():
        return _folder_spec(Path(name))
    try:
        return DATASETS[name]
    except UserError as error:
        raise UserError(f"{error}; or pass the path of a folder DOMAIN/CLASS/IMAGE") from None


def _folder_spec(path: Path) -> DatasetSpec:
    path = path.resolve()
    domains = tuple(folder.subfolders(path))
    for name in (*domains, "."):
        folder.require_text(path / name)
    if (n := len(domains)) < 2:
        raise UserError(
            f"{path} has {n} domain{'s' * (n != 1)}: expected at least two folders, each with "
            "CLASS/IMAGE below it"
        )
    return DatasetSpec(
        name=str(path),
        domains=domains,
        labels=domains,
        n_classes=len(folder.class_names(path, domains)),
        citation=f"your own images in {path.name}",
        read=folder.reader(path.name, domains),
        folder=str(path),  # absolute, so that joining it to a data folder changes nothing
    )


def register_dataset(
    name: str,
    *,
    domains: Sequence[str],
    n_classes: int,
    labels: Sequence[str] | None = None,
    citation: str = "",
    **facts: object,
) -> Callable[[Callable[[Path], Contents]], Callable[[Path], Contents]]:
    """Register a dataset of your own under a name.

    The decorated function takes the dataset's folder (`folder` below the data folder, or the data
    folder itself) and returns the class names and the domains.

    Args:
        name: the name that users type.
        domains: the names of its domains, in order.
        n_classes: the number of classes.
        labels: the domains' short names in tables (default: `domains`).
        citation: where it comes from.
        **facts: any other field of `DatasetSpec`.

    Examples:
        >>> import numpy as np
        >>> from steppe.domains import Arrays, Domain, register_dataset
        >>> @register_dataset(
        ...     "Noise",
        ...     domains=["dark", "bright"],
        ...     n_classes=2,
        ...     image_size=8,
        ...     augment=False,
        ...     backbone="small-cnn",
        ...     pretrained=False,
        ... )
        ... def noise(root):
        ...     rng = np.random.default_rng(0)
        ...     labels = rng.integers(2, size=50)
        ...     dark, bright = (rng.integers(top, size=(50, 8, 8, 3)) for top in (100, 256))
        ...     return ["a", "b"], [
        ...         Domain("dark", Arrays(dark.astype(np.uint8)), labels),
        ...         Domain("bright", Arrays(bright.astype(np.uint8)), labels),
        ...     ]
        >>> len(load("noise").domains)
        2
    """
    fields = [field.name for field in dataclasses.fields(DatasetSpec)]
    for fact in facts:
        if fact not in fields:
            raise UserError(unknown(f"fact about dataset {name!r}:", fact, fields))

    def decorate(read: Callable[[Path], Contents]) -> Callable[[Path], Contents]:
        spec = DatasetSpec(
            name=name,
            domains=tuple(domains),
            labels=tuple(labels or domains),
            n_classes=n_classes,
            citation=citation,
            read=read,
            **facts,  # type: ignore[arg-type]
        )
        DATASETS.add(spec)
        return read

    return decorate


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register datasets, also from the working directory."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no local file shadows an installed module
    for module in modules:
        if not all(part.isidentifier() for part in str(module).split(".")):
            raise UserError(
                f"plugin {module!r} is not a module name; expected a name such as my.datasets"
            )
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # an import inside the plugin failed
                raise
            raise UserError(
                f"cannot import plugin {module!r}: it is not installed, and it is neither in this "
                "folder nor on PYTHONPATH"
            ) from None


def data_folder() -> Path:
    """Return the folder that holds the datasets: ``$STEPPE_DATA``, or ``data`` by default.

    Examples:
        >>> data_folder().name
        'data'
    """
    return Path(os.environ.get("STEPPE_DATA") or "data")


def load(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, packed: bool = True
) -> Dataset:
    """Open a dataset by listing its images; none is decoded.

    Args:
        name: a name from `dataset_names()`, or the path of a folder `root/domain/class/image`.
        root: the data folder (default: `data_folder()`).
        packed: whether to use a valid pack from ``steppe data pack`` if there is one.

    Examples:
        >>> digits = load("RotatedDigits")
        >>> [domain.name for domain in digits.domains]
        ['0', '15', '30', '45', '60', '75']
        >>> digits.domains[0].images[0].shape
        (8, 8, 1)
    """
    spec = dataset_spec(name)
    home = Path(root) if root is not None else data_folder()
    if packed and spec.folder is not None:
        from . import pack  # slow to import, and naming datasets does not need it

        if (found := pack.find(spec, home)) is not None:
            return found
    where = spec.where(home)
    classes, domains = spec.read(where)
    if len(classes) != spec.n_classes:
        raise UserError(
            f"dataset {spec.name!r} has {spec.n_classes} classes, but {where} has {len(classes)}: "
            f"{', '.join(classes[:8])}, ... Run 'steppe data check {spec.name}'."
        )
    origin = "in memory" if spec.folder is None else f"files in {where}"
    return Dataset(spec, tuple(classes), tuple(domains), origin)
