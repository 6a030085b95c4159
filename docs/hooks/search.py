"""Helps the site's search: guides rank above the reference, and pages have synonyms.

A page's `keywords`, in its front matter, are words that people type and the page does not use.
"""

from typing import Any

BOOST = {"guide": 3.0, "faq.md": 3.0, "reference": 0.02, "changelog.md": 0.02}


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    first = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {}).setdefault("boost", BOOST.get(first, 1.0))
    return markdown


def on_page_content(html: str, /, *, page: Any, **_: Any) -> str:
    words = page.meta.get("keywords")
    # In the page's own entry of the index, not in that of its last section.
    return html.replace("</h1>", f"</h1><p hidden>{words}</p>", 1) if words else html
