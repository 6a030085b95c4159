"""The palette: no two methods look alike, and all can be read."""

import math
import subprocess
import sys

import pytest

from steppe.reports.palette import COLOURS, DARK, KNOWN, looks


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour):
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(colour):
    r, g, b = linear(colour)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y, z = luminance(colour), (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize(("colours", "page"), [(COLOURS, "#ffffff"), (DARK, "#1e2129")])
def test_colours_differ_and_can_be_read(colours, page):
    places = [lab(colour) for colour in colours]
    apart = [math.dist(a, b) for i, a in enumerate(places) for b in places[:i]]
    assert min(apart) > 9  # 2.3 is what an eye can just see side by side
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG, for what figures are read by


def test_every_optimizer_has_a_look_of_its_own():
    listed = "from steppe.optim import optimizer_names; print(*optimizer_names())"
    ours = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, check=True
    )
    assert set(ours.stdout.split()) == set(KNOWN)
    found = looks(KNOWN).values()
    assert len({look.colour for look in found}) == len(KNOWN)
    assert len({(look.marker, look.hollow) for look in found}) == len(KNOWN)
    assert any(look.marks["markerfacecolor"] != look.colour for look in found)


def test_a_look_does_not_depend_on_the_company():
    alone, among = looks(["fad"])["fad"], looks(["mine", "sgd", "fad swad", "fad"])
    assert among["fad"] == alone
    assert len({look.colour for look in among.values()}) == 4
    crowd = looks(f"Algorithm{i} fad" for i in range(len(COLOURS) - len(KNOWN)))
    assert len({look.colour for look in crowd.values()}) == len(crowd)


def test_in_a_crowd_of_any_size_no_two_share_color_and_shape():
    crowd = looks([*KNOWN, *(f"{a} {b}" for a in KNOWN[:12] for b in KNOWN)]).values()
    assert len({(look.colour, look.marker, look.hollow) for look in crowd}) == len(crowd) > 350
