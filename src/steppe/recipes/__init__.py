"""The paper's tables and figures as recipes, with the paper's numbers beside ours."""

from .catalog import RECIPES
from .orders import Order, Place, Rate, make_order
from .paper import Beside, Printed, lookup, printed
from .recipe import SCALES, Part, Recipe, Scale
from .reproduce import plan, reproduce, write_results
from .results import Results

__all__ = [
    "RECIPES",
    "SCALES",
    "Beside",
    "Order",
    "Part",
    "Place",
    "Printed",
    "Rate",
    "Recipe",
    "Results",
    "Scale",
    "lookup",
    "make_order",
    "plan",
    "printed",
    "reproduce",
    "write_results",
]
