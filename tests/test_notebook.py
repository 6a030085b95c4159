"""`examples/quickstart.ipynb`: its cells run, in order, and show what the text says."""

import json
import re
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "examples/quickstart.ipynb"


def test_the_cells_run_in_order() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert not cell["outputs"]  # stored without them
    assert names["accuracy"] > 0.3  # ten classes
    assert names["found"].values[0] > 0
    assert names["best"]["step"] <= 50
    assert names["trained"].classes == names["digits"].classes


def test_the_links_lead_somewhere() -> None:
    text = NOTEBOOK.read_text()
    for target in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (NOTEBOOK.parent / target).exists(), target
