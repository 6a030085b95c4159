"""The datasets by name: one record each, and the registry for more.

A record says everything about a dataset that does not need its images: the command line, the docs
and the tests read it from here.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steppe.errors import UserError, unknown

from . import digits, doodles, folder, mnist, nico, pack
from .dataset import Dataset, Domain

Contents = tuple[Sequence[str], Sequence[Domain]]
"""The class names and the domains, in order."""


@dataclass(frozen=True)
class DatasetSpec:
    """What is known about a dataset before its images are looked at.

    Attributes:
        name: what users call it.
        domains: the domains in DomainBed's order, which numbers them; folder names.
        labels: the domains' short names in tables.
        n_classes: how many classes it has.
        citation: the paper it comes from.
        read: returns the classes and the domains, given the dataset's folder.
        folder: its folder below the data folder, or None where it needs no files.
        counts: the number of images of each domain, or None where it is not known.
        steps: the length of a run as DomainBed counts it: the last record is at ``steps - 1``.
        checkpoint_every: steps between two evaluations.
        batch_size: images of each source domain in a step.
        batch_exponents: DomainBed searches batch sizes of 2^U(low, high).
        image_size: height and width of what the network sees.
        channels: 3, or what the arrays have.
        augment: whether training images are cropped, flipped and jittered at random.
        backbone: the network trained unless another is asked for.
        pretrained: whether the backbone starts from ImageNet weights.
        target_sets: what is held out together, where that is not one domain at a time.
        valley_every: steps between two looks at the validation loss, for averaging that follows it.
        valley_tolerance: how far, relatively, that loss may rise above where it converged.
    """

    name: str
    domains: tuple[str, ...]
    labels: tuple[str, ...]
    n_classes: int
    citation: str
    read: Callable[[Path], Contents]
    folder: str | None = None
    counts: tuple[int, ...] | None = None
    steps: int = 5001
    checkpoint_every: int = 300
    batch_size: int = 32
    batch_exponents: tuple[float, float] = (3, 5.5)
    image_size: int = 224
    channels: int = 3
    augment: bool = True
    backbone: str = "resnet50"
    pretrained: bool = True
    target_sets: tuple[tuple[str, ...], ...] = ()
    valley_every: int = 100
    valley_tolerance: float = 0.3

    @property
    def targets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of domains that a full evaluation holds out in turn."""
        return self.target_sets or tuple((name,) for name in self.domains)

    def label(self, domain: str) -> str:
        """The short name of a domain in tables."""
        return self.labels[self.domains.index(domain)]


def _folders(*domains: str, exclude: str | None = None) -> Callable[[Path], Contents]:
    """A reader of `root/domain/class/image`, leaving out what the file `exclude` lists."""

    def read(root: Path) -> Contents:
        listed = root / exclude if exclude else None
        lines = folder.lines(listed) if listed and listed.exists() else ()
        return folder.read_folder(root, domains, [line.strip() for line in lines])

    return read


_PACS = ("art_painting", "cartoon", "photo", "sketch")
_VLCS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
_OFFICE_HOME = ("Art", "Clipart", "Product", "Real World")
_TERRA = ("location_100", "location_38", "location_43", "location_46")
_DOMAIN_NET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DUPLICATES = "domain_net_duplicates.txt"
"""DomainBed's list of 9,431 repeated images of DomainNet, one ``domain/class/image`` a line."""

_SPECS = (
    DatasetSpec(
        name="PACS",
        domains=_PACS,
        labels=("A", "C", "P", "S"),
        n_classes=7,
        citation="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
        read=_folders(*_PACS),
        folder="PACS",
        counts=(2048, 2344, 1670, 3929),
    ),
    DatasetSpec(
        name="VLCS",
        domains=_VLCS,
        labels=("C", "L", "S", "V"),
        n_classes=5,
        citation="Fang et al., Unbiased Metric Learning, ICCV 2013",
        read=_folders(*_VLCS),
        folder="VLCS",
        counts=(1415, 2656, 3282, 3376),
        valley_every=50,
        valley_tolerance=0.2,
    ),
    DatasetSpec(
        name="OfficeHome",
        domains=_OFFICE_HOME,
        labels=("A", "C", "P", "R"),
        n_classes=65,
        citation="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, "
        "CVPR 2017",
        read=_folders(*_OFFICE_HOME),
        folder="office_home",
        counts=(2427, 4365, 4439, 4357),
    ),
    DatasetSpec(
        name="TerraIncognita",
        domains=_TERRA,
        labels=("L100", "L38", "L43", "L46"),
        n_classes=10,
        citation="Beery et al., Recognition in Terra Incognita, ECCV 2018",
        read=_folders(*_TERRA),
        folder="terra_incognita",
        counts=(4879, 9767, 4020, 6122),
    ),
    DatasetSpec(
        name="DomainNet",
        domains=_DOMAIN_NET,
        labels=("clip", "info", "paint", "quick", "real", "sketch"),
        n_classes=345,
        citation="Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019",
        read=_folders(*_DOMAIN_NET, exclude=DUPLICATES),
        folder="domain_net",
        counts=(48129, 51605, 72266, 172500, 172947, 69128),
        steps=15001,
        checkpoint_every=1000,
        batch_exponents=(3, 5),
        valley_every=500,
    ),
    DatasetSpec(
        name="NICO++",
        domains=nico.DOMAINS,
        labels=nico.DOMAINS,
        n_classes=60,
        citation="Zhang et al., NICO++: Towards Better Benchmarking for Domain Generalization, "
        "CVPR 2023",
        read=nico.read,
        folder="NICO++",
        steps=10001,
        target_sets=(("autumn", "rock"), ("dim", "grass"), ("outdoor", "water")),
    ),
    DatasetSpec(
        name="RotatedMNIST",
        domains=mnist.ANGLES,
        labels=mnist.ANGLES,
        n_classes=10,
        citation="Ghifary et al., Domain Generalization for Object Recognition with Multi-task "
        "Autoencoders, ICCV 2015",
        read=mnist.rotated,
        folder="MNIST",
        counts=(11667, 11667, 11667, 11667, 11666, 11666),
        checkpoint_every=100,
        batch_size=64,
        batch_exponents=(3, 9),
        image_size=28,
        channels=1,
        augment=False,
        backbone="mnist-cnn",
        pretrained=False,
    ),
    DatasetSpec(
        name="ColoredMNIST",
        domains=mnist.COLORS,
        labels=mnist.COLORS,
        n_classes=2,
        citation="Arjovsky et al., Invariant Risk Minimization, 2019",
        read=mnist.colored,
        folder="MNIST",
        counts=(23334, 23333, 23333),
        checkpoint_every=100,
        batch_size=64,
        batch_exponents=(3, 9),
        image_size=28,
        channels=2,
        augment=False,
        backbone="mnist-cnn",
        pretrained=False,
    ),
    DatasetSpec(
        name="RotatedDigits",
        domains=digits.ANGLES,
        labels=tuple(f"{angle}°" for angle in digits.ANGLES),
        n_classes=10,
        citation="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 "
        "(as in scikit-learn)",
        read=lambda _: digits.read(),
        counts=(300, 300, 300, 299, 299, 299),
        steps=301,
        checkpoint_every=50,
        valley_every=10,
        image_size=8,
        channels=1,
        augment=False,
        backbone="small-cnn",
        pretrained=False,
    ),
    DatasetSpec(
        name="Doodles",
        domains=doodles.STYLES,
        labels=doodles.STYLES,
        n_classes=len(doodles.CLASSES),
        citation="drawn by steppe",
        read=lambda _: doodles.read(),
        counts=(doodles.PER_STYLE,) * len(doodles.STYLES),
        steps=301,
        checkpoint_every=50,
        valley_every=10,
        image_size=doodles.SIZE,
        augment=False,
        backbone="small-cnn",
        pretrained=False,
    ),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}
_OWN = frozenset(_BY_NAME)


def dataset_names() -> tuple[str, ...]:
    """Return the names that `dataset_spec` and `load` know.

    Examples:
        >>> dataset_names()[:3]
        ('PACS', 'VLCS', 'OfficeHome')
    """
    return tuple(_BY_NAME)


def dataset_spec(name: str | os.PathLike[str]) -> DatasetSpec:
    """Return the record of a dataset, or one made for a folder `root/domain/class/image`.

    Args:
        name: a name, in any case, or the path of a folder.

    Examples:
        >>> dataset_spec("pacs").domains
        ('art_painting', 'cartoon', 'photo', 'sketch')
    """
    name = os.fspath(name)
    by_lower = {known.lower(): spec for known, spec in _BY_NAME.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    path = Path(name)
    if path.is_dir():
        return _folder_spec(path)
    hint = "; or give the path of a folder DOMAIN/CLASS/IMAGE"
    raise UserError(unknown("dataset", name, _BY_NAME) + hint)


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
        read=_folders(*domains),
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
        labels: short names for tables; the domains' own unless given.
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
    if name.lower() in (known.lower() for known in _BY_NAME if known != name or name in _OWN):
        raise UserError(f"there is a dataset {name!r} already: give yours another name")
    fields = [field.name for field in dataclasses.fields(DatasetSpec)]
    for fact in facts:
        if fact not in fields:
            raise UserError(unknown(f"fact about dataset {name!r}:", fact, fields))

    def decorate(read: Callable[[Path], Contents]) -> Callable[[Path], Contents]:
        _BY_NAME[name] = DatasetSpec(
            name=name,
            domains=tuple(domains),
            labels=tuple(labels or domains),
            n_classes=n_classes,
            citation=citation,
            read=read,
            **facts,  # type: ignore[arg-type]
        )
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
        root: the data folder; `data_folder()` unless given.
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
        found = pack.find(spec, home)
        if found is not None:
            return found
    where = home / spec.folder if spec.folder is not None else home
    classes, domains = spec.read(where)
    if len(classes) != spec.n_classes:
        raise UserError(
            f"dataset {spec.name!r} has {spec.n_classes} classes, but {where} has {len(classes)}: "
            f"{', '.join(classes[:8])}, ... See 'steppe data check {spec.name}'."
        )
    origin = "in memory" if spec.folder is None else f"files in {where}"
    return Dataset(spec, tuple(classes), tuple(domains), origin)
