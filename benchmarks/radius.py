"""How FAD's rho, learning rate and batch size move together, by validation accuracy.

python benchmarks/radius.py run digits doodles --save benchmarks/radius-cpu.json
python benchmarks/radius.py table        # writes the tables into docs/guide/defaults.md
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from defaults import HERE, PAGE, SEEDS, STUDIES, carry_out, write_tables

RHO = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
FACTORS = (1 / 3, 1, 3)
BATCHES = (8, 32)
STORED = HERE / "radius-cpu.json"


def run(name: str, out: Path, workers: int | None) -> dict[str, Any]:
    """Accuracies by batch size, rho and learning rate."""
    from steppe.optim import optimizer_spec
    from steppe.sweeps import Grid

    study = STUDIES[name]
    default = optimizer_spec("fad").defaults(pretrained=False)["lr"]
    settings = [(b, r, default * f) for b, r, f in product(BATCHES, RHO, FACTORS)]
    planned = [
        Grid(
            (study.dataset,),
            optimizers=("fad",),
            trials=SEEDS,
            draws=0,
            targets=study.target,
            overrides=(f"optimizer.lr={lr:.4g}", f"optimizer.rho={rho:g}", f"batch_size={batch}"),
            tag=f"b{batch}-rho{rho:g}-lr{lr:.3g}",
        )
        for batch, rho, lr in settings
    ]
    found: dict[str, Any] = {}
    values = carry_out(f"radius-{name}", planned, out, workers=workers)
    for (batch, rho, lr), seeds in zip(settings, values, strict=True):
        found.setdefault(str(batch), {}).setdefault(f"{rho:g}", {})[f"{lr:.3g}"] = seeds
    return found


def table(found: dict[str, Any]) -> str:
    """One row for each batch size and rho, one column for each learning rate, as Markdown."""
    rates = list(next(iter(next(iter(found.values())).values())))
    lines = [
        f"| images per domain | rho | {' | '.join(f'lr {rate}' for rate in rates)} |",
        "|---|---|" + "---|" * len(rates),
    ]
    for batch, by_rho in found.items():
        for rho, by_rate in by_rho.items():
            cells = ["diverged" if None in v else f"{fmean(v):.1f}" for v in by_rate.values()]
            lines.append(f"| {batch} | {rho} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run", help="run studies and store what they gave")
    running.add_argument("studies", nargs="+", choices=("digits", "doodles"))
    running.add_argument("--out", type=Path, default=Path("runs/radius"))
    running.add_argument("--save", type=Path, required=True)
    running.add_argument("--workers", type=int)
    commands.add_parser("table", help="write the tables into the docs")
    arguments = parser.parse_args()
    if arguments.command == "table":
        stored = json.loads(STORED.read_text())["studies"]
        made = {f"radius-{name}": table(found) for name, found in stored.items()}
        PAGE.write_text(write_tables(PAGE.read_text(), made))
        return
    import torch

    from steppe.bench.record import environment, write

    found = {}
    for name in arguments.studies:
        found[name] = run(name, arguments.out, arguments.workers)
        print(f"{STUDIES[name].title}\n{table(found[name])}", flush=True)
        facts = environment(torch.device("cpu"), "python benchmarks/radius.py")
        write({"environment": facts, "studies": found}, arguments.save)


if __name__ == "__main__":
    main()
