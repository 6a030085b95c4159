"""The datasets by name: those that steppe brings, and the registry for more."""

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
    """Return the names that `dataset_spec` and `load` know.

    Examples:
        >>> dataset_names()[:3]
        ('PACS', 'VLCS', 'OfficeHome')
    """
    return tuple(DATASETS)


def dataset_spec(name: str | os.PathLike[str]) -> DatasetSpec:
    """Return the record of a dataset by its name, in any case, or by the path of a folder.

    A folder is one of yours, laid out as `root/domain/class/image`.

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
        raise UserError(f"{error}; or give the path of a folder DOMAIN/CLASS/IMAGE") from None


def _folder_spec(path: Path) -> DatasetSpec:
    path = path.resolve()
    domains = tuple(folder.subfolders(path))
    for name in (*domains, "."):
        folder.require_text(path / name)
    if len(domains) < 2:
        raise UserError(
            f"{path} has {len(domains)} domains: expected at least two folders, each with "
            "CLASS/IMAGE below it"
        )
    return DatasetSpec(
        name=str(path),
        domains=domains,
        labels=domains,
        n_classes=len(folder.class_names(path, domains)),
        citation=f"your own images in {path.name}",
        read=folder.reader(domains),
        folder=str(path),  # absolute: stays itself below any data folder
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
    """Give a dataset of your own a name.

    The function it decorates returns the class names and the domains, given the dataset's folder:
    the one called `folder` below the data folder, or the data folder itself.

    Args:
        name: what users will call it.
        domains: the names of its domains, in order.
        n_classes: how many classes it has.
        labels: short names for tables (default: the domains' own).
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
    """Import modules that register datasets; they may lie in the working folder."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # as `python -m` has it, but last
    for module in modules:
        if not all(part.isidentifier() for part in str(module).split(".")):
            raise UserError(
                f"plugin {module!r} is not a module name; expected for example my.datasets"
            )
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # one that the plugin imports
                raise
            raise UserError(
                f"plugin {module!r} cannot be imported: it is neither installed nor in this folder "
                "or on PYTHONPATH"
            ) from None


def data_folder() -> Path:
    """Where datasets are looked for: ``$STEPPE_DATA``, or ``data`` here.

    Examples:
        >>> data_folder().name
        'data'
    """
    return Path(os.environ.get("STEPPE_DATA") or "data")


def load(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, packed: bool = True
) -> Dataset:
    """Open a dataset: list its images, without decoding any.

    Args:
        name: a name from `dataset_names()`, or the path of a folder `root/domain/class/image`.
        root: the data folder (default: `data_folder()`).
        packed: whether to use a pack made by ``steppe data pack`` where there is a valid one.

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
            f"{', '.join(classes[:8])}, ... See 'steppe data check {spec.name}'."
        )
    origin = "in memory" if spec.folder is None else f"files in {where}"
    return Dataset(spec, tuple(classes), tuple(domains), origin)
