"""The tables of options and step times are what the registry says."""

import json
from pathlib import Path

from steppe.algorithms import AlgorithmSpec, algorithm_names, algorithm_spec
from steppe.options import Like, Option

NAMES = algorithm_names()
"""Now, before the guide's own example adds one."""
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference/algorithms.md"


def described(name: str, option: Option) -> str:
    default = "as the optimizer's" if option.default is None else f"{option.default:.4g}"
    drawn = "as its `lr`" if isinstance(option.search, Like) else repr(option.distribution)
    return f"`{name}` {default}" + ("" if drawn == repr(option.default) else f" ({drawn})")


def row(spec: AlgorithmSpec) -> str:
    options = [described(name, option) for name, option in spec.options.items()]
    return f"| {spec.name} | {', '.join(options) or 'none'} |"


def test_table() -> None:
    lines = REFERENCE.read_text().splitlines()
    start = lines.index("| algorithm | options |") + 2
    rows = [row(algorithm_spec(name)) for name in NAMES]
    assert lines[start : start + len(rows) + 1] == [*rows, ""]


def test_step_times() -> None:
    """The registry's are those of the record, and the guide's are the registry's."""
    record = json.loads((ROOT / "benchmarks/algorithms-h200-fp16.json").read_text())["algorithms"]
    guide = (ROOT / "docs/guide/algorithms.md").read_text().splitlines()
    for name in NAMES:
        cost = algorithm_spec(name).cost
        assert cost == round(record[name]["over ERM"]["median"], 2)
        (line,) = (line for line in guide if line.startswith(f"| {name} |"))
        assert line.endswith(f"| {cost:.2f} |")
