"""Launchers start the workers of a sweep: on this machine, on Ray, on Slurm.

A launcher is a class in a file of its own, which declares its name and options:

    @register_launcher("local")
    class Local:
        def start(self, sweep, crew, show): ...

`Crew` holds the settings that all launchers share.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from steppe.axes import AxisSpec, declared, registrar
from steppe.console import Live, say, stderr, stdout
from steppe.errors import UserError
from steppe.registry import Registry

from .status import Status, show as shown, summary
from .store import STALE_SECONDS
from .sweep import Sweep, read_plan
from .tidy import tidy

C = TypeVar("C", bound=type)
Show = Callable[[Status], None]
LINE_SECONDS, STILL_SECONDS = 10.0, 300.0
"""Time between status lines without a terminal: after a change, and without one."""


@dataclass(frozen=True)
class Crew:
    """The workers to start.

    Attributes:
        workers: number of workers (default: one per GPU or core; on Slurm at most 16).
        per_gpu: workers that share a GPU.
        threads: CPU threads per worker. Results depend on it, so use the same number everywhere.
        stale: seconds without a heartbeat after which a worker is considered dead.
    """

    workers: int | None = None
    per_gpu: int = 1
    threads: int = 1
    stale: float = STALE_SECONDS

    def command(self, sweep: Path, device: str) -> list[str]:
        """The command line of one worker."""
        return [
            *(sys.executable, "-m", "steppe", "sweep", "work", str(sweep)),
            *("--device", device, "--threads", str(self.threads), "--stale", f"{self.stale:g}"),
        ]


_TAKEN = {*Crew.__dataclass_fields__, "path", "launcher", "plugin", "help", "sweep", "crew", "show"}
"""Options of `steppe sweep run` and parameters of `run_sweep`."""


class Launcher(Protocol):
    """The interface of a launcher; its own options are keyword arguments of its constructor."""

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> Status | str:
        """Start the workers of a sweep; while waiting for them, pass the status to `show`.

        Returns:
            The final status; or, if the workers were only submitted, a message for the user.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(AxisSpec):
    """A registered launcher. Its options have the types of their defaults; None means text."""

    kind: ClassVar[str] = "launcher"

    def __post_init__(self) -> None:
        for name in _TAKEN & self.options.keys():
            raise UserError(
                f"launcher {self.name!r} cannot have an option {name!r}: 'steppe sweep run' "
                "already uses that name. Rename it."
            )

    def check(self, given: Mapping[str, Any]) -> None:
        for key in given.keys() - self.options.keys():
            if others := [spec.name for spec in launchers.entries() if key in spec.options]:
                option = "--" + key.replace("_", "-")
                raise UserError(
                    f"{option} is for --launcher {' or '.join(others)}, not {self.name}"
                )
        texts = {key for key, option in self.options.items() if option.default is None}
        super().check({key: value for key, value in given.items() if key not in texts})


launchers = Registry(
    "launcher", lambda: declared(LauncherSpec, __package__, "register_launcher", ("local",))
)


def register_launcher(name: str) -> Callable[[C], C]:
    """Register your own launcher: a class decorator for a module that you pass to ``--plugin``.

    Constructor parameters annotated with `steppe.options.Option` become the launcher's options, on
    the command line too. Describe them in the `Args` section of the class's docstring.
    """
    return registrar(launchers, LauncherSpec, name)


def run_sweep(
    sweep: Sweep,
    launcher: str = "local",
    crew: Crew | None = None,
    show: Show = lambda status: None,
    **options: Any,
) -> Status | str:
    """Run a sweep; other workers may work on it at the same time.

    Args:
        sweep: the sweep.
        launcher: one of `launchers`.
        crew: the workers to start.
        show: called regularly with the status.
        **options: the launcher's own.

    Returns:
        The same as `Launcher.start`.
    """
    spec, crew = launchers[launcher], crew or Crew()
    spec.check(options)
    tidy(sweep, crew.stale)
    starter: Launcher = spec.cls(**options)
    return starter.start(sweep, crew, show)


def run(path: Path, launcher: str, crew: Crew, **options: Any) -> bool | None:
    """Run a sweep and show its status; return whether every run is done, or None if submitted."""
    sweep, console = read_plan(path), stderr()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        said, before = -math.inf, ""

        def show(status: Status) -> None:
            nonlocal said, before
            if console.is_terminal:
                live.update(shown(sweep, status), refresh=True)
                return
            states, line = summary(status)
            waited = time.monotonic() - said
            if waited >= STILL_SECONDS or (waited >= LINE_SECONDS and states != before):
                say(console, f"{sweep.path}: {states}; {line}")
                said, before = time.monotonic(), states

        found = run_sweep(sweep, launcher, crew, show, **options)
    if isinstance(found, str):
        say(stdout(), found)
        return None
    console.print(shown(sweep, found))
    return found.complete
