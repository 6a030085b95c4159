"""Algorithms by name, each with its options, their search distributions and its paper."""

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
    """One entry of the registry.

    Attributes:
        min_domains: the number of source domains it needs.
        min_batch: the number of images of a domain it needs at once.
        linear: whether its loss is a mean over images, so that processes that share a batch compute
            what one would.
        run: what it asks of the run as a whole, where images are large: the batch size.
        drawn_as: names under which DomainBed seeds draws of the optimizer's options, where the
            algorithm changes them.
    """

    kind: ClassVar[str] = "algorithm"

    min_domains: int = 1
    min_batch: int = 1
    linear: bool = False
    run: Mapping[str, Hyperparameter] = field(default_factory=dict)
    drawn_as: Mapping[str, str] = field(default_factory=dict)

    def check_domains(self, n_domains: int) -> None:
        """Refuses to learn from so few source domains."""
        if n_domains < self.min_domains:
            raise UserError(
                f"algorithm {self.name!r} compares domains and needs at least {self.min_domains} "
                f"source domains, not {n_domains}: add a --source, or hold out fewer targets"
            )

    def check_batch(self, images: int) -> None:
        """Refuses to see so few images of a domain at once."""
        if images < self.min_batch:
            raise UserError(
                f"algorithm {self.name!r} needs at least {self.min_batch} images of each domain at "
                f"once, and batch_size over processes and accumulate leaves {images}: raise "
                "batch_size"
            )


# The order of tables and lists; others follow by name.
_ORDER = (
    *("ERM", "IRM", "VREx", "GroupDRO", "Mixup", "MLDG", "MMD", "CORAL", "DANN", "CDANN"),
    *("MTL", "SagNet", "ARM", "RSC", "MixStyle", "MIRO", "Fishr"),
)
algorithms = Registry(
    "algorithm", lambda: declared(AlgorithmSpec, __package__, "register_algorithm", first=_ORDER)
)


def register_algorithm(name: str, *, citation: str = "", **facts: Any) -> Callable[[C], C]:
    """Add an algorithm of your own: a decorator for its class, in a module named with ``--plugin``.

    The class is built as ``cls(network, n_domains, **options)``; what its constructor annotates
    with `steppe.options.Option` are its options. Other `facts` are fields of `AlgorithmSpec`.
    """
    return registrar(algorithms, AlgorithmSpec, name, citation=citation, **facts)


def algorithm_names() -> tuple[str, ...]:
    """Return the names that `build_algorithm` knows."""
    return tuple(algorithms)


def algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the entry of the registry for a name, in any case.

    Examples:
        >>> algorithm_spec("coral").options["penalty"].distribution
        10^U(-1, 1)
    """
    return algorithms[name]


def build_algorithm(name: str, network: Network, n_domains: int, **options: Any) -> Algorithm:
    """Build an algorithm by name, in any case, around a network, which some of them change.

    Options that are not given have their defaults; an unknown one is an error.
    """
    spec = algorithms[name]
    spec.check(options)
    spec.check_domains(n_domains)
    built: Algorithm = spec.cls(network, n_domains, **options)
    return built
