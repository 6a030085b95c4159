"""The built-in datasets, one file each."""

from .digits import ROTATED_DIGITS
from .domain_net import DOMAIN_NET
from .doodles import DOODLES
from .mnist import COLORED_MNIST, ROTATED_MNIST
from .nico import NICO
from .office_home import OFFICE_HOME
from .pacs import PACS
from .terra_incognita import TERRA_INCOGNITA
from .vlcs import VLCS

BUILT_IN = (
    PACS,
    VLCS,
    OFFICE_HOME,
    TERRA_INCOGNITA,
    DOMAIN_NET,
    NICO,
    ROTATED_MNIST,
    COLORED_MNIST,
    ROTATED_DIGITS,
    DOODLES,
)
"""In the order of lists and tables."""
