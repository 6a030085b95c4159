"""A short soak loses nothing: commands are killed and failed at their file operations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import seconds
from tests.soak.injector import compiler

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="the injector is made for Linux"
    ),
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
]


def test_a_short_soak_loses_nothing(tmp_path):
    answer = tmp_path / "verdicts.json"
    chosen = ("train", "work", "run", "pack", "repack", "report")
    words = [word for name in chosen for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--faults", "5", "--json", str(answer), *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=seconds(600),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(answer.read_text())
    assert {verdict["scenario"] for verdict in verdicts} == set(chosen)
    assert sum(bool(verdict["what"]) for verdict in verdicts) >= 20  # most met their fault
    assert not list(tmp_path.glob("steppe-soak-*"))
