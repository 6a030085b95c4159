"""Helps the site's search: guides rank above the reference, and pages have synonyms.

A page's `keywords`, in its front matter, are words that people type and the page does not use.
"""

from typing import Any

BOOST = {"guide": 3.0, "integrations": 2.0, "reference": 0.2, "changelog.md": 0.1}


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    first = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {}).setdefault("boost", BOOST.get(first, 1.0))
    return markdown


def on_page_content(html: str, /, *, page: Any, **_: Any) -> str:
    words = page.meta.get("keywords")
    return f"{html}<p hidden>{words}</p>" if words else html
