"""Writes the tables of the pages on algorithms from the registry and the step times measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import fill

from steppe.algorithms import AlgorithmSpec, algorithm_names, algorithm_spec
from steppe.cli.listing import short_citation
from steppe.options import Like, Option

DOCS = Path(__file__).parent
PAGES = tuple(DOCS / folder / "algorithms.md" for folder in ("guide", "reference", "results"))
RECORDS = {
    "ResNet-18, 3 x 8, two CPU cores": "algorithms-cpu.json",
    "ResNet-50, 3 x 32, fp16, one H200": "algorithms-h200-fp16.json",
}
ABSENT = "not in DomainBed"


def tables() -> dict[str, str]:
    """Every table of the pages, by name."""
    specs = [algorithm_spec(name) for name in algorithm_names()]
    specs = [spec for spec in specs if spec.cls.__module__.startswith("steppe.")]  # no plugins
    return {
        "algorithms": overview(specs),
        "sections": "\n".join(map(section, specs)),
        "options": options(specs),
        "differences": differences(specs),
        "processes": processes(specs),
        "step times": step_times(specs),
        "accuracies": accuracies(
            "sanity-cpu", {"with a weaker penalty": ("sanity-weak-cpu", "sanity-iga-cpu")}
        ),
        "accuracies on photographs": accuracies(
            "sanity-pacs-cpu",
            {
                "with a weaker penalty": tuple(
                    f"sanity-pacs-{how}-cpu" for how in ("weak", "faint", "iga")
                ),
                "from a fitted classifier": ("sanity-pacs-probe-cpu",),
            },
        ),
    }


def rows(*cells: tuple[str, ...]) -> str:
    """A table in Markdown; the first row is its header."""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]) + "\n"


def overview(specs: list[AlgorithmSpec]) -> str:
    head = ("algorithm", "what it adds to the mean cross-entropy", "step time", "paper")
    return rows(head, *((s.name, s.idea, time(s.cost), short_citation(s.citation)) for s in specs))


def time(relative: float | None) -> str:
    return "" if relative is None else f"{relative:.2f}"


def section(spec: AlgorithmSpec) -> str:
    place = "" if spec.cls.__name__ == "ERM" else f".{spec.cls.__module__.rpartition('.')[2]}"
    return f"::: steppe.algorithms{place}.{spec.cls.__name__}\n    options:\n      members: []\n"


def options(specs: list[AlgorithmSpec]) -> str:
    found = ((s.name, ", ".join(described(*one) for one in s.options.items())) for s in specs)
    return rows(("algorithm", "options"), *((name, own or "none") for name, own in found))


def described(name: str, option: Option) -> str:
    default = "as the optimizer's" if option.default is None else f"{option.default:.4g}"
    drawn = "as its `lr`" if isinstance(option.search, Like) else repr(option.distribution)
    return f"`{name}` {default}" + ("" if drawn == repr(option.default) else f" ({drawn})")


def differences(specs: list[AlgorithmSpec]) -> str:
    found = [(s.name, s.differs) for s in specs if s.differs and s.differs != ABSENT]
    absent = ", ".join(s.name for s in specs if s.differs == ABSENT)
    table = rows(("algorithm", "what differs from DomainBed, and why"), *found)
    return f"{table}\nDomainBed does not have {absent}. All others match it.\n"


def processes(specs: list[AlgorithmSpec]) -> str:
    """What several processes compute; algorithms that compute the same share a row."""
    by_words: dict[str, list[str]] = {}
    for spec in specs:
        words = spec.processes or (
            "the same as one process with the whole batch, because losses are means over images"
            if spec.linear
            else "the mean of the processes' losses; each process computes its own, penalties "
            "included, from its own images"
        )
        by_words.setdefault(words, []).append(spec.name)
    found = ((", ".join(names), words) for words, names in by_words.items())
    return rows(("algorithm", "what it computes"), *found)


def step_times(specs: list[AlgorithmSpec]) -> str:
    found = [measured(file) for file in RECORDS.values()]
    cells = ((s.name, *(time(times.get(s.name)) for times in found)) for s in specs)
    return rows(("algorithm", *RECORDS), *cells)


def measured(file: str) -> dict[str, float]:
    """Median step times relative to ERM's, of a record of `benchmarks/step.py`."""
    record: dict[str, Any] = json.loads((DOCS.parent / "benchmarks" / file).read_text())
    if "algorithms" in record:  # of an earlier version of the script
        return {name: own["over ERM"]["median"] for name, own in record["algorithms"].items()}
    over = " over ERM"
    ratios = ((name.removesuffix(over), own["median"]) for name, own in record["ratios"].items())
    return {"ERM": 1.0, **dict(ratios)}


def accuracies(file: str, others: Mapping[str, Sequence[str]]) -> str:
    """What short runs reached; `others` names the records of further columns, by heading."""
    found = reached(file)
    further = {
        heading: {name: own for file in files for name, own in reached(file).items()}
        for heading, files in others.items()
    }
    base = found["ERM"]["validation"]
    head = ("algorithm", "source validation", "minus ERM's", "target", *further)
    cells = (
        (
            name,
            mean(own, "validation"),
            "" if name == "ERM" else f"{own['validation'] - base:+.1f}",
            mean(own, "target"),
            *(
                mean(runs[name], "validation") if name in runs and name != "ERM" else ""
                for runs in further.values()
            ),
        )
        for name, own in found.items()
    )
    return rows(head, *cells)


def reached(file: str) -> dict[str, dict[str, Any]]:
    """Results of a record of `benchmarks/sanity.py`, by algorithm."""
    record = json.loads((DOCS.parent / "benchmarks" / f"{file}.json").read_text())
    found: dict[str, dict[str, Any]] = record["algorithms"]
    return found


def mean(own: dict[str, Any], part: str) -> str:
    deviation = own[f"deviation of {part}"]
    return f"{own[part]:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


if __name__ == "__main__":
    made = tables()
    for page in PAGES:
        page.write_text(fill(page.read_text(), made, Path(__file__).name))
