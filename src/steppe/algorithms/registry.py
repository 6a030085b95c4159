"""The registry of algorithms: options, search distributions and citations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from steppe.axes import AxisSpec, declared, registrar
from steppe.errors import UserError
from steppe.registry import Registry
from steppe.search import Hyperparameter

if TYPE_CHECKING:
    from .algorithm import Algorithm
    from .network import Network

C = TypeVar("C", bound=type)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(AxisSpec):
    """A registered algorithm.

    Attributes:
        idea: what it adds to the mean cross-entropy, in a few words.
        differs: what differs from DomainBed, and why; empty if nothing does.
        processes: what several processes that share a batch compute; empty if each computes the
            loss of its own images, and gradients are averaged.
        cost: the time of a step relative to ERM's, if measured (ResNet-18, 3 x 8 images, two CPU
            cores).
        min_domains: the minimum number of source domains.
        min_batch: the minimum number of images per domain in a batch.
        linear: whether the loss is a mean over images, so that several processes sharing a batch
            compute the same loss as one process.
        keeps_classifier: whether the classifier is fixed, so that nothing else may train it.
        run: run-wide hyperparameters it sets for large images, such as the batch size.
        drawn_as: DomainBed's seeding names for optimizer options, where they differ.
    """

    kind: ClassVar[str] = "algorithm"

    idea: str = ""
    differs: str = ""
    processes: str = ""
    cost: float | None = None
    min_domains: int = 1
    min_batch: int = 1
    linear: bool = False
    keeps_classifier: bool = False
    run: Mapping[str, Hyperparameter] = field(default_factory=dict)
    drawn_as: Mapping[str, str] = field(default_factory=dict)

    def check_domains(self, n_domains: int) -> None:
        if n_domains < self.min_domains:
            raise UserError(
                f"algorithm {self.name!r} compares domains and needs at least {self.min_domains} "
                f"source domains, got {n_domains}: add a --source, or hold out fewer targets"
            )

    def check_batch(self, images: int) -> None:
        if images < self.min_batch:
            raise UserError(
                f"algorithm {self.name!r} needs at least {self.min_batch} images per domain in "
                f"each pass, but batch_size / (processes * accumulate) is {images}: raise "
                "batch_size"
            )


# The display order; other algorithms follow alphabetically.
_ORDER = (
    *("ERM", "IRM", "VREx", "GroupDRO", "Mixup", "MLDG", "MMD", "CORAL", "DANN", "CDANN"),
    *("MTL", "SagNet", "ARM", "RSC", "MixStyle", "MIRO", "Fishr"),
    *("SD", "ANDMask", "SANDMask", "IGA", "SelfReg", "Fish", "TRM", "IB-ERM", "IB-IRM"),
    *("CAD", "CondCAD", "Transfer", "CausIRL-CORAL", "CausIRL-MMD", "EQRM", "RDM", "ADRMX", "URM"),
    *("MASF", "DMG", "MetaReg", "ER", "pAdaIN", "EISNet", "DSON", "CLIPood"),
)
algorithms = Registry(
    "algorithm", lambda: declared(AlgorithmSpec, __package__, "register_algorithm", first=_ORDER)
)


def register_algorithm(name: str, *, citation: str = "", **facts: Any) -> Callable[[C], C]:
    """Register an `Algorithm` subclass; use as a decorator in a module passed to ``--plugin``.

    steppe builds the class as ``cls(network, n_domains, **options)``. Its options are the
    constructor parameters annotated with `steppe.options.Option`. Other `facts` are fields of
    `AlgorithmSpec`.
    """
    return registrar(algorithms, AlgorithmSpec, name, citation=citation, **facts)


def algorithm_names() -> tuple[str, ...]:
    """List the names that `build_algorithm` accepts."""
    return tuple(algorithms)


def algorithm_spec(name: str) -> AlgorithmSpec:
    """Look up an algorithm's registry entry; names are case-insensitive.

    Examples:
        >>> algorithm_spec("coral").options["penalty"].distribution
        10^U(-1, 1)
    """
    return algorithms[name]


def build_algorithm(
    name: str, network: Network, n_domains: int, *, steps: int | None = None, **options: Any
) -> Algorithm:
    """Build an algorithm by case-insensitive name.

    Some algorithms modify the network. Omitted options take their defaults; an unknown option is
    an error. `steps` is the run's number of steps, for algorithms that divide it into phases.
    """
    spec = algorithms[name]
    spec.check(options)
    spec.check_domains(n_domains)
    if steps is not None and "steps" in spec.further:
        options["steps"] = steps
    built: Algorithm = spec.cls(network, n_domains, **options)
    return built
