"""The seven examples of how to add something, as they stand on their pages, used from outside."""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from tests import processes

DOCS = Path(__file__).parents[1] / "docs/guide"
PAGES = {  # page, and the words that the example's code has
    "my_methods": ("new-methods.md", "class CRSAM"),
    "my_algorithms": ("new-algorithms.md", "class Confident"),
    "my_data": ("data.md", "def stripes"),
    "my_launchers": ("sweeps.md", "class Ssh"),
    "my_columns": ("reports.md", "register_column("),
    "my_experiments": ("reproduce.md", "register_experiment("),
    "my_protocols": ("protocols.md", "register_protocol("),
}
SSH = """#!/bin/sh
shift
exec sh -c "$*"
"""


def example(page: str, words: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return "\n".join(line for line in found.splitlines() if not line.startswith("assert"))


def test_each_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, place in PAGES.items():
        (tmp_path / f"{module}.py").write_text(example(*place))
    ssh = tmp_path / "bin/ssh"  # carries the command out here
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def steppe(*words: str) -> str:
        done = processes.Steppe(*words, folder=tmp_path)
        assert done.wait() == 0, done.stderr
        return done.stdout

    plugins = [f"--plugin={name}" for name in ("my_methods", "my_algorithms", "my_data")]
    grid = ["--datasets=Stripes", "--optimizers=cr-sam", "--algorithms=Confident", "--trials=1"]
    grid += ["--draws=2", "--steps=2", "--no-estimate", "--set", "batch_size=4"]
    steppe("sweep", "plan", "sweep", *plugins, *grid)
    where = ["--plugin=my_launchers", "--launcher=ssh", "--host=here"]
    steppe("sweep", "run", "sweep", *where)
    status = json.loads(steppe("sweep", "status", "sweep", "--json"))
    assert status["counts"]["done"] == 4  # two targets, two draws
    config = json.loads(next((tmp_path / "sweep/runs").glob("*draw1/config.json")).read_text())
    assert config["optimizer"]["rho"] in (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert 0.01 <= config["algorithm"]["penalty"] <= 1
    report = steppe("report", "sweep", "--plugin=my_columns", "--format=markdown")
    assert "| last loss |" in report
    small = ["--scale=smoke", "--datasets=RotatedDigits", "--trials=1", "--share=0.001"]
    made = steppe("reproduce", "radius", "--plugin=my_experiments", *small, "--workers=1")
    assert "rho 0.05" in made
    one = next((tmp_path / "reproduce/radius-smoke/runs").glob("*/config.json"))
    assert json.loads(one.read_text())["plugins"] == ["my_experiments"]
    own = ["--protocol=ours", "--plugin=my_protocols", "--datasets=RotatedDigits"]
    steppe("sweep", "plan", "ours", *own, "--no-estimate")
    assert json.loads((tmp_path / "ours/sweep.json").read_text())["protocol"]["name"] == "ours"
    runs = list((tmp_path / "ours/runs").iterdir())
    assert len(runs) == 6 * 5  # targets, samples on one split
    steps = {json.loads((run / "config.json").read_text())["steps"] for run in runs}
    assert steps == {201}
