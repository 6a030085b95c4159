"""Generated data for the report page: ordinary, crowded, hostile."""

import math
import random
from typing import Any

from steppe.reports.report import page_columns

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=2">',
    "<!--<script>' & \" \\u003c ${window.pwned=3} $data",
    "\u2028javascript:window.pwned=4\U0001f40e",
    "x" * 400,
)

PACS = ["art_painting", "cartoon", "photo", "sketch"]
NAMES = {  # name: algorithm, optimizer, averaging
    "adam": ("ERM", "adam", "none"),
    "sgd": ("ERM", "sgd", "none"),
    "sam": ("ERM", "sam", "none"),
    "gam": ("ERM", "gam", "none"),
    "fad": ("ERM", "fad", "none"),
    "CORAL adam": ("CORAL", "adam", "none"),
    "fad swad": ("ERM", "fad", "swad"),
}
PASSES = {"sam": 2, "gam": 4, "fad": 3, "fad swad": 3}


def methods(n: int) -> dict[str, tuple[str, str, str]]:
    """The names above, and as many more as are asked for."""
    more = {f"Algorithm{i} fad": (f"Algorithm{i}", "fad", "none") for i in range(n)}
    return dict(list((NAMES | more).items())[:n])


def sample(
    n_methods: int = 7,
    datasets: tuple[str, ...] = ("PACS", "OfficeHome"),
    n_steps: int = 17,
    n_points: int = 20,
) -> dict[str, Any]:
    """A report as it comes from a finished sweep; the same numbers at every call."""
    random.seed(0)
    named = methods(n_methods)
    steps = [round(5000 * i / (n_steps - 1)) for i in range(n_steps)]

    def number(low: float, high: float) -> float:
        return random.uniform(low, high)

    def table(dataset: str, columns: list[str]) -> dict[str, Any]:
        rows = []
        for i, (algorithm, optimizer, averaging) in enumerate(named.values()):
            cells: dict[str, Any] = {
                c: {"mean": number(70, 90), "err": number(0.1, 1.5), "n": 3} for c in columns
            }
            if i == 1:
                cells[columns[-1]] = None
            whole = all(cells.values())
            avg = sum(cell["mean"] for cell in cells.values()) / len(columns) if whole else None
            row = {"algorithm": algorithm, "optimizer": optimizer, "averaging": averaging}
            provenance = {"steps": [5000], "runs": 240, "space": "domainbed"}
            rows.append(row | {"cells": cells, "avg": avg} | provenance)
        return {"dataset": dataset, "selection": "train-val", "columns": columns, "rows": rows}

    def curve(best: float, start: float) -> list[float | None]:
        ends = [best - (best - start) * math.exp(-i / n_steps * 5) for i in range(n_steps)]
        return [value + number(-0.6, 0.6) for value in ends]

    def series(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "steps": steps,
            "val": curve(number(88, 95), 30),
            "test": curve(number(74, 86), 25),
            "loss": [2.5 * math.exp(-i / n_steps * 5) + number(0.01, 0.02) for i in range(n_steps)],
            "runs": 3,
        }

    def point(choice: int, target: str) -> dict[str, Any]:
        lr = 10 ** number(-5.5, -3.5)
        accuracy = 85 - 6 * (math.log10(lr) + 4.3) ** 2 + number(-2, 2)
        return {
            "choice": f"draw {choice}",
            "trial": choice % 3,
            "target": target,
            "accuracy": accuracy,
            "validation": accuracy + number(5, 8),
            "hparams": {
                "lr": lr,
                "weight_decay": 10 ** number(-6, -2),
                "batch_size": round(2 ** number(3, 5.5)),
                "resnet_dropout": random.choice([0.0, 0.1, 0.5]),
                "nonlinear": random.choice([True, False]),
            },
        }

    return {
        "title": "PACS and OfficeHome",
        "command": "steppe report sweeps/pacs --selection train-val --format html",
        "made": "2026-11-15T12:00:00Z",
        "versions": {"steppe": "0.1.0", "torch": "2.15.0", "python": "3.13.1"},
        "selection": "train-val",
        "columns": page_columns(),
        "problems": ["runs/a/records.jsonl line 7: not JSON", "runs/b: no config.json"],
        "tables": [table(dataset, PACS) for dataset in datasets],
        "across": table("all", list(datasets)),
        "answer": [
            "fad leads with 84.1%; gam is next with 83.0%.",
            "All 240 runs took 9 GPU-hours.",
        ],
        "multiplicity": {"tests": 21, "note": "p values are Holm-corrected for 21 pairs."},
        "hours": {"GPU": 9.0},
        "comparisons": [
            {
                "a": name,
                "b": "adam",
                "difference": mid,
                "low": mid - half,
                "high": mid + half,
                "level": 0.95,
                "n": 24,
                "what": "24 pairs; interval over 8 targets",
                "seeds_low": mid - half / 1.2,
                "seeds_high": mid + half / 1.2,
                "seeds": 3,
                "targets_low": mid - half,
                "targets_high": mid + half,
                "decided_over": "trials",
                "p": 0.01,
                "p_adjusted": 0.03 if abs(mid) > half / 1.2 else 0.2,
                "verdict": "significant" if abs(mid) > half / 1.2 else "inconclusive",
            }
            for name in list(named)[1:]
            for mid, half in [(number(-1.5, 3), number(0.4, 1.5))]
        ],
        "cost": [
            {
                "dataset": dataset,
                "name": name,
                "seconds_per_step": 0.11 * PASSES.get(name, 1) * number(0.95, 1.15),
                "relative": PASSES.get(name, 1) * number(0.95, 1.15),
                "passes": PASSES.get(name, 1),
                "memory_gb": number(7, 9),
                "accuracy": number(78, 86),
                "err": number(0.1, 0.8),
            }
            for dataset in datasets
            for name in named
        ],
        "curves": [
            {"dataset": dataset, "target": target, "series": [series(name) for name in named]}
            for dataset in datasets
            for target in PACS
        ],
        "sensitivity": [
            {
                "dataset": dataset,
                "name": name,
                "points": [point(i, PACS[i % 4]) for i in range(n_points)],
            }
            for dataset in datasets
            for name in named
        ],
        "flatness": [
            {
                "run": f"runs/pacs-{name}-0",
                "name": name,
                "lambda_max": 90.0 / (i + 1),
                "trace": 800.0 / (i + 1),
                "spectrum": [90.0 / (i + 1) * 0.8**k for k in range(10)],
            }
            for i, name in enumerate(named)
        ],
    }


def hostile() -> dict[str, Any]:
    """The ordinary report with every text replaced by a nasty one, and every fifth number lost."""
    texts = iter(range(10**9))
    numbers = iter(range(10**9))

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {spoil(k) if k in PACS else k: spoil(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        if isinstance(value, str):
            if value in PACS:  # columns and the keys of cells must stay equal
                return HOSTILE[PACS.index(value)]
            return HOSTILE[next(texts) % len(HOSTILE)]
        if isinstance(value, float) and next(numbers) % 5 == 0:
            return random.choice([None, math.nan, math.inf, 1e308, 0.0, -1e-320])
        return value

    random.seed(1)
    return spoil(sample(n_methods=5, n_steps=5, n_points=8))


EMPTY: dict[str, Any] = {
    "title": None,
    "command": None,
    "made": None,
    "versions": {},
    "selection": None,
    "problems": [],
    "tables": [],
    "across": None,
    "comparisons": [],
    "cost": [],
    "curves": [],
    "sensitivity": [],
    "flatness": [],
}
