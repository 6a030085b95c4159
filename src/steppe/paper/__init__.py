"""The paper's tables and figures, each an experiment, with the paper's numbers beside ours."""

from .experiment import EXPERIMENTS, SCALES, Arm, Experiment, Scale, register_experiment
from .numbers import lookup, printed
from .order import Order, make_order
from .results import Results
from .run import plan, reproduce, write_results

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Arm",
    "Experiment",
    "Order",
    "Results",
    "Scale",
    "lookup",
    "make_order",
    "plan",
    "printed",
    "register_experiment",
    "reproduce",
    "write_results",
]
