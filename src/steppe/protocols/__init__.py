"""Protocols: what a fair comparison of methods fixes, each as a table in a file of its own."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .planning import plan as plan
    from .protocol import (
        FILE as FILE,
        OWN as OWN,
        Protocol as Protocol,
        Rule as Rule,
        protocols as protocols,
        register_protocol as register_protocol,
    )
    from .winners import plan_winners as plan_winners
else:  # hidden from type checkers, which would otherwise accept any attribute
    __getattr__, __dir__, __all__ = attach(__name__)
