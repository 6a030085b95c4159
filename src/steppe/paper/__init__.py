"""Experiments that reproduce the paper's tables and figures, with its numbers next to ours."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .experiment import (
        EXPERIMENTS as EXPERIMENTS,
        SCALES as SCALES,
        Arm as Arm,
        Experiment as Experiment,
        Scale as Scale,
        register_experiment as register_experiment,
    )
    from .numbers import lookup as lookup, printed as printed
    from .order import Order as Order, make_order as make_order
    from .results import Results as Results
    from .run import plan as plan, reproduce as reproduce, write_results as write_results
else:  # hidden from type checkers, which would accept any name because of __getattr__
    __getattr__, __dir__, __all__ = attach(__name__)
