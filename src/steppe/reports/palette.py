"""One palette of colors and markers for the report page, the experiments and the docs.

steppe's own methods look the same in every figure. Other methods take the remaining looks in order
of appearance. Colors repeat only when all are in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# After Okabe and Ito, darkened or lightened to a contrast of at least 3 to 1.
_KNOWN = {  # on white, on black
    "adam": ("#6b6b6b", "#a9a9a9"),
    "sgd": ("#0072b2", "#56b4e9"),
    "sam": ("#a87400", "#e6b422"),
    "gam": ("#b3558b", "#e08fbf"),
    "fad": ("#c84f00", "#ff8a3d"),
    "adamw": ("#008a63", "#2fc299"),
    "yogi": ("#5b4fc4", "#a79df5"),
    "adabelief": ("#8a1538", "#f2708f"),
    "adahessian": ("#4b6b00", "#a3c644"),
    "gam-exact": ("#007f91", "#4fd0e0"),
    "gam-release": ("#7a4a2b", "#cf9c78"),
    "asam": ("#d926d9", "#e619e5"),
}
_OTHERS = (  # found by a search that maximizes distances in CIELAB
    ("#2626d9", "#6363ee"),
    ("#45305a", "#cf59c5"),
    ("#6d1575", "#e61990"),
    ("#d92644", "#e6192a"),
    ("#244224", "#19e619"),
    ("#d9269d", "#e6195d"),
    ("#36a136", "#d8f9c8"),
    ("#b85ec9", "#f1d0f1"),
    ("#c9675e", "#c65139"),
    ("#8f74b4", "#a23eea"),
    ("#8b814b", "#e5e619"),
    ("#8420b6", "#ac5396"),
    ("#193b4d", "#5371ac"),
    ("#713d4a", "#f9d8c8"),
    ("#1a4293", "#c8f1f9"),
    ("#d92671", "#b96e6e"),
    ("#93931a", "#f2e088"),
    ("#932e1a", "#c68b39"),
    ("#497bdf", "#197fe6"),
    ("#b48474", "#f6acb2"),
)

KNOWN = tuple(_KNOWN)
COLOURS = tuple(pair[0] for pair in (*_KNOWN.values(), *_OTHERS))
"""Colors on white, by place."""
DARK = tuple(pair[1] for pair in (*_KNOWN.values(), *_OTHERS))
"""The same hues on black."""
MARKERS = ("X", "o", "s", "D", "^", "v", "P", "<", ">", "p", "h", "*", "d", "8", "H")
"""In matplotlib's notation; the page draws them in the same order."""
DASHES = ("-", "--", ":", "-.")


class Look(NamedTuple):
    """A method's color, marker and dash pattern."""

    place: int

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dark(self) -> str:
        return DARK[self.place % len(DARK)]

    @property
    def marker(self) -> str:
        return MARKERS[self.place % len(MARKERS)]

    @property
    def dash(self) -> str:
        return DASHES[self.place // len(MARKERS) % len(DASHES)]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign looks to methods, by name.

    Examples:
        >>> found = looks(["fad swad", "fad", "mine"])
        >>> found["fad"].colour == looks(["fad"])["fad"].colour
        True
        >>> len({look.colour for look in found.values()})
        3
    """
    found: dict[str, Look] = {}
    free = len(KNOWN)
    for name in dict.fromkeys(names):
        found[name] = Look(KNOWN.index(name) if name in KNOWN else free)
        free += name not in KNOWN
    return found


def page_style() -> str:
    """The page's CSS classes `c0`, `c1`, ..., each with its light and dark color."""
    pairs = enumerate(zip(COLOURS, DARK, strict=True))
    return "\n".join(f".c{i} {{ --mark: light-dark({on}, {off}); }}" for i, (on, off) in pairs)
