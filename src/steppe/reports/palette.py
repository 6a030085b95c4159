"""One palette of colors and markers for the report page, the experiments and the docs.

Every optimizer that steppe registers has its own color and shape (marker, filled or hollow), the
same in every figure. Other methods, such as `fad swad`, take the remaining looks in order of
appearance: 20 colors are left for them, and they reuse shapes, but no pair of color and shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

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
    # These and the others were found by a search that maximizes distances in CIELAB.
    "c-flat": ("#2626d9", "#6363ee"),
    "disam": ("#45305a", "#cf59c5"),
    "disam-fad": ("#6d1575", "#e61990"),
    "disam-gsam": ("#d92644", "#e6192a"),
    "disam-sagm": ("#244224", "#19e619"),
    "f-sam": ("#d9269d", "#e6195d"),
    "genie": ("#36a136", "#d8f9c8"),
    "gga-l": ("#b85ec9", "#f1d0f1"),
    "gsam": ("#c9675e", "#c65139"),
    "looksam": ("#8f74b4", "#a23eea"),
    "msam": ("#8b814b", "#e5e619"),
    "pgn": ("#8420b6", "#ac5396"),
    "rwp": ("#193b4d", "#5371ac"),
    "sagm": ("#713d4a", "#f9d8c8"),
    "sam-on": ("#1a4293", "#c8f1f9"),
    "vasso": ("#d92671", "#b96e6e"),
    "wsam": ("#93931a", "#f2e088"),
}
_OTHERS = (
    ("#932e1a", "#c68b39"),
    ("#497bdf", "#197fe6"),
    ("#b48474", "#f6acb2"),
    ("#f90606", "#adf915"),
    ("#a806f9", "#ec9cfc"),
    ("#7c8eb1", "#42faeb"),
    ("#0606f9", "#06f994"),
    ("#464002", "#3dae04"),
    ("#759f60", "#acfc9c"),
    ("#025517", "#038123"),
    ("#245af9", "#217a83"),
    ("#6a0c4a", "#f95706"),
    ("#403326", "#617949"),
    ("#609f8f", "#86b696"),
    ("#b17c96", "#83694e"),
    ("#121ea1", "#038162"),
    ("#ae0404", "#818103"),
    ("#71a112", "#86fb6f"),
    ("#a96ffb", "#8757b7"),
    ("#cf7b3f", "#a5c577"),
)

KNOWN = tuple(_KNOWN)
COLOURS = tuple(pair[0] for pair in (*_KNOWN.values(), *_OTHERS))
"""Colors on white, by place."""
DARK = tuple(pair[1] for pair in (*_KNOWN.values(), *_OTHERS))
"""The same places' colors on black."""
MARKERS = ("X", "o", "s", "D", "^", "v", "P", "<", ">", "p", "h", "*", "d", "8", "H")
"""In matplotlib's notation; the page draws them in the same order, first filled, then hollow."""
DASHES = ("-", "--", ":", "-.")


class Look(NamedTuple):
    """A method's color, marker (filled or hollow) and dash pattern."""

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
    def hollow(self) -> bool:
        return self.place // len(MARKERS) % 2 == 1

    @property
    def marks(self) -> dict[str, Any]:
        """Arguments for matplotlib, on white."""
        inside = "white" if self.hollow else self.colour
        return {"marker": self.marker, "color": self.colour, "markerfacecolor": inside}

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
