"""Runs the examples of README.md, docs/ and the docstrings as tests."""

import doctest
from importlib.util import find_spec

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# A machine with a GPU, where only the tests for it are run, may lack what the examples need.
if find_spec("sybil"):
    from sybil import Sybil
    from sybil.document import PythonDocStringDocument
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
    from sybil.parsers.rest import DocTestParser
    from sybil.sybil import SybilCollection

    # A pattern is matched from the right, so that "*.md" under a path means every depth below it.
    MARKDOWN = [SkipParser(), PythonCodeBlockParser(doctest_optionflags=OPTIONS)]
    readme = Sybil(name="readme", parsers=MARKDOWN, pattern="README.md")
    docs = Sybil(name="docs", parsers=MARKDOWN, path="docs", pattern="*.md")
    docstrings = Sybil(
        name="docstrings",
        parsers=[*MARKDOWN, DocTestParser(OPTIONS)],
        path="src",
        pattern="*.py",
        document_types={".py": PythonDocStringDocument},
    )
    pytest_collect_file = SybilCollection([readme, docs, docstrings]).pytest()
else:

    def pytest_report_header() -> str:
        return "sybil is not installed: the examples of the docs are not run"
