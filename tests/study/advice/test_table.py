"""Tables: what is written is read, and what is wrong is refused with its row."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from steppe.errors import UserError
from steppe.study.advice import table as tables
from steppe.study.advice.table import read_table, shipped, write_table
from tests.study.advice.simulated import table


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    examples, facts = table(1, 0, families=2), {"machine": "laptop", "seeds": 10}
    write_table(tmp_path / "t.json", examples, facts)
    found = read_table(tmp_path / "t.json")
    assert found.examples == tuple(examples)
    assert found.facts == facts
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert sum('"task"' in line for line in lines) == len(examples)
    write_table(tmp_path / "again.json", found.examples, found.facts)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()


def edit(row: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        row = row[name]
    row[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("indicators.x0", float("nan"), r"row 2 \(task 'family0-1'\): indicators.x0=nan"),
        ("indicators.x0", float("inf"), r"row 2 .*indicators.x0=inf"),
        ("indicators.x0", "1.5", r"row 2 .*indicators.x0='1.5'"),
        ("indicators.x0", True, r"row 2 .*indicators.x0=True"),
        ("indicators.x0", 10**400, r"row 2 .*indicators.x0"),
        ("indicators.x0", 1e200, r"row 2 .*indicators.x0=1e\+200"),
        ("indicators.new", 1.0, r"row 2 .*indicators differ from row 1's: new"),
        ("scores.sam", [50.0] * 9 + [101.0], r"row 2 .*scores.sam.9=101.0"),
        ("scores.sam", [50.0] * 9, r"row 2 .*same number of seeds.*'sam': 9"),
        ("scores.sam", [], r"row 2 .*scores.sam"),
        ("scores.lion", [50.0] * 10, r"row 2 .*scores differ from row 1's: lion"),
        ("scores", {}, r"row 2 .*scores"),
        ("task", "family0-0", r"row 2 .*an earlier row has the same task"),
        ("family", "", r"row 2 .*family=''"),
        ("family", "a\x1b[2J", r"row 2 .*family="),
        ("color", "red", r"row 2 .*color='red'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_row(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    file = tmp_path / "t.json"
    write_table(file, table(1, 0, families=1), {})
    facts = json.loads(file.read_text())
    edit(facts["examples"][1], path, value)
    file.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=re.escape(str(file)) + ".*" + message):
        read_table(file)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "{}", "1" * 5000, "[" * 100_000),
        '{"version": 1, "facts": {}, "examples": []}',
        '{"version": 2, "facts": {}, "examples": []}',
        '{"version": 1, "facts": [], "examples": []}',
        '{"version": 1, "facts": {}, "examples": {}}',
        '{"version": 1, "facts": {}, "examples": [3]}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match=r"t\.json"):
        read_table(tmp_path / "t.json")
    with pytest.raises(UserError, match="none.json"):
        read_table(tmp_path / "none.json")


def test_a_missing_table_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "table.json")
    shipped.cache_clear()
    with pytest.raises(UserError, match="has no table of measured tasks"):
        shipped()
    write_table(tmp_path / "table.json", table(1, 0, families=1), {})
    assert len(shipped().examples) == 4
    shipped.cache_clear()
