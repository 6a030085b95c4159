r"""Turns the TeX of a page into MathML while the site is built.

Browsers draw MathML themselves, so the pages need no script and no font from another host.
`\( \)`, `$ $`, `\[ \]` and `$$ $$` all arrive here in the form `pymdownx.arithmatex` gives them.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

BAR = re.compile(r"<mo[^>]*>(\||&#x0007C;|&#x02223;|&#x02016;|&#x02225;|∥|‖|∣)</mo>")
MATH = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S
)


def on_page_content(page_html: str, /, *, page: Any, **_: Any) -> str:
    def mathml(match: re.Match[str]) -> str:
        tex = html.unescape(match["tex"]).strip()
        problem = PluginError(f"{page.file.src_uri}: cannot read the formula {tex!r}")
        try:
            converted = convert(tex, display="inline" if match["open"] == "(" else "block")
        except Exception as error:  # the converter has an exception of its own for each mistake
            raise problem from error
        if "\\" in converted or "<mi>&amp;</mi>" in converted or "<mi>&</mi>" in converted:
            raise problem  # it copies what it does not know: a command, a column of a table
        # Bars that stand for a norm are no operators between things: no space around them.
        converted = BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', converted)
        wide = match["open"] == "["
        return f'<div class="formula">{converted}</div>' if wide else converted

    return MATH.sub(mathml, page_html)
