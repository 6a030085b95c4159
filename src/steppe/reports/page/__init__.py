"""The report as one HTML page that needs no network: tables, figures and their provenance."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from steppe.reports.palette import COLOURS, KNOWN, page_style
from steppe.reports.values import plain

__all__ = ["render_page"]

# One module in five files, in this order: each uses what the ones before it define.
_SCRIPTS = ("base.js", "tables.js", "charts.js", "figures.js", "sections.js")


def render_page(data: Mapping[str, Any]) -> str:
    """Draws a report as one self-contained page, in ASCII.

    The script, the styles and the data are part of the page. Its content security policy names the
    script and the styles by their digests and forbids everything else, requests included.

    Args:
        data: what `Report.page_data` returns. Lists may be empty and values `None`; numbers that
            are not finite count as missing.

    Examples:
        >>> page = render_page({"title": "</script> & co", "tables": []})
        >>> "<title>&lt;/script&gt; &amp; co</title>" in page
        True
    """
    script, style = "\n".join(map(_text, _SCRIPTS)), f"{_text('page.css')}\n{page_style()}\n"
    looks = {"known": list(KNOWN), "colours": len(COLOURS)}
    # JSON that cannot end the script element it stands in, nor begin a comment there.
    embedded = json.dumps(plain({**data, "palette": looks}), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        embedded = embedded.replace(character, f"\\u{ord(character):04x}")
    page = Template(_text("page.html")).substitute(
        title=html.escape(str(data.get("title") or "steppe report")),
        script=script,
        script_digest=_digest(script),
        style=style,
        style_digest=_digest(style),
        data=embedded,
    )
    # Character references also carry the lone surrogates of file names that are not UTF-8. Script
    # and style know no references: they are ASCII, and the data is JSON in ASCII.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("ascii")).digest()).decode("ascii")
