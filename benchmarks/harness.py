"""Code shared by all benchmarks: command line, interleaved rounds, tables, stored results."""

import inspect
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
import typer
from torch.optim import Optimizer

from steppe.cli.common import writable
from steppe.cli.extras import missing
from steppe.console import Meter, Table, stderr, stdout, table
from steppe.domains import load
from steppe.durable import replace
from steppe.environment import environment
from steppe.errors import RunError, UserError
from steppe.strangers import printable
from steppe.training.processes import find_device

Result = dict[str, Any]
T = TypeVar("T")
O = TypeVar("O", bound="Options")  # noqa: E741

PACKED = "A folder DOMAIN/CLASS/IMAGE, packed on first use"
KNOWN = "Any name that 'steppe train' accepts."


def option(default: Any, help: str, *flags: str, **limits: Any) -> Any:
    return field(default=default, metadata={"typer": typer.Option(*flags, help=help, **limits)})


IMAGES = option(None, f"{PACKED} (default: generated images).", metavar="DIR")
OVERRIDES = option(None, "Any config key: optimizer.rho=0.1.", "--set", metavar="KEY=VALUE")


@dataclass(frozen=True, kw_only=True)
class Options:
    device = "cpu"
    as_json: bool = option(False, "Print the result as JSON.", "--json")
    save: Path | None = option(None, "Also save the result to this file.", callback=writable)

    @property
    def where(self) -> torch.device:
        return find_device(self.device)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    device: str = option("auto", "auto (a GPU if available), cpu, cuda, cuda:1, ...")


@dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOptions):
    images: Path | None = IMAGES
    backbone: str = option("resnet18", KNOWN)
    optimizer: str = option("adam", KNOWN)
    precision: str = option("auto", "auto, fp32, tf32, fp16 or bf16.")

    def values(self, images: Path) -> dict[str, Any]:
        """Return a config for training from random weights, stable in half precision."""
        return {
            "dataset": str(images),
            "targets": [load(images).domains[-1].name],
            "backbone": self.backbone,
            "weights": "none",
            "freeze_bn": True,
            "optimizer": {"name": self.optimizer, "lr": 1e-4},
            "device": str(self.where),
            "precision": self.precision,
        }


def command(options: type[O], measure: Callable[[O], Result]) -> Callable[[], None]:
    """Build a script's `main`, and call it if the script is the main program."""
    name = Path(str(sys.modules[measure.__module__].__file__)).name

    def run(**values: Any) -> None:
        chosen = options(**values)
        found = measure(chosen)
        result = {"environment": environment(chosen.where, f"python benchmarks/{name}"), **found}
        text = json.dumps(result, indent=2)
        if chosen.save is not None:
            replace(chosen.save, f"{text}\n".encode())
        if chosen.as_json:
            print(text)
        else:
            stdout().print(*tables(result), sep="\n")

    def main() -> None:
        # Clean up temporary folders and child processes on SIGTERM, as on Ctrl-C.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(help=sys.modules[measure.__module__].__doc__)(run)
        try:
            app(prog_name=name)
        except ModuleNotFoundError as error:
            sys.exit(missing(error))
        except (UserError, RunError, OSError) as error:
            print(printable(f"{name}: {error}"), file=sys.stderr)
            sys.exit(1 if isinstance(error, RunError) else 2)

    run.__signature__ = _signature(options)  # type: ignore[attr-defined]
    if measure.__module__ == "__main__":
        main()
    return main


def _signature(options: type[Options]) -> inspect.Signature:
    hints, found = get_type_hints(options), inspect.signature(options).parameters
    typed: dict[str, Any] = {
        f.name: Annotated[hints[f.name], f.metadata["typer"]] for f in fields(options)
    }
    return inspect.Signature([p.replace(annotation=typed[p.name]) for p in found.values()])


def track(items: Iterable[T], title: str) -> Iterator[T]:
    every = list(items)
    with Meter(title, len(every), console=stderr()) as meter:
        for item in every:
            yield item
            meter.advance()


def take_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, title: str, *, warm_up: int = 0
) -> dict[str, list[T]]:
    """Run all contenders in every round, so that they share noise; return their results."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in track(range(-warm_up, rounds), title):
        for name, run in contenders.items():
            value = run()
            if number >= 0:
                found[name].append(value)
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, run: Callable[[], object], times: int = 1) -> float:
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait(device)
    return (time.perf_counter() - began) / times


def spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def tables(result: Result) -> list[Table]:
    """Format a result as one table of scalars and one table per nested part."""
    parts = {k: v for k, v in result.items() if isinstance(v, dict) and k != "environment"}
    parts |= {k: dict(enumerate(v)) for k, v in result.items() if v and isinstance(v, list)}
    single = {k: v for k, v in result.items() if not isinstance(v, dict | list)}
    return [_table("", single), *(_table(name, part) for name, part in parts.items() if part)]


def _table(heading: str, rows: Mapping[Any, Any]) -> Table:
    if not all(isinstance(row, dict) and "median" not in row for row in rows.values()):
        return table([heading, ""], [[name, _cell(row)] for name, row in rows.items()])
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if len(columns) > len(rows):  # transpose wide tables
        rows, columns = {c: {r: rows[r].get(c, "") for r in rows} for c in columns}, list(rows)
    cells = [
        [name, *(_cell(row.get(column, "")) for column in columns)] for name, row in rows.items()
    ]
    return table([heading, *map(str, columns)], cells)


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        median, low, high = map(_cell, list(value.values())[:3])
        return f"{median} ({low} to {high})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)


class Still(Optimizer):
    """A base optimizer that does nothing, so that only the wrapper is timed."""

    _step_supports_amp_scaling = True  # no host-device synchronization

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass
