"""The report as one self-contained HTML page."""

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

# One JavaScript module in five files; each uses definitions of the files before it.
_SCRIPTS = ("base.js", "tables.js", "charts.js", "figures.js", "sections.js")


def render_page(data: Mapping[str, Any]) -> str:
    """Render a report as one self-contained ASCII page.

    The page embeds its script, styles and data. Its content security policy allows only this
    script and these styles, by digest, and forbids all network requests.

    Args:
        data: from `Report.page_data`. Lists may be empty and values `None`; non-finite numbers
            count as missing.

    Examples:
        >>> page = render_page({"title": "</script> & co", "tables": []})
        >>> "<title>&lt;/script&gt; &amp; co</title>" in page
        True
    """
    script, style = "\n".join(map(_text, _SCRIPTS)), f"{_text('page.css')}\n{page_style()}\n"
    looks = {"known": list(KNOWN), "colours": len(COLOURS)}
    # Escaped so that the JSON cannot close the script element or open a comment in it.
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
    # Character references also handle lone surrogates from file names that are not UTF-8. The
    # script, style and data cannot contain references, but they are already ASCII.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("ascii")).digest()).decode("ascii")
