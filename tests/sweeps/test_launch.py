"""Launchers by name: steppe's own and a plugin's, with their own options."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from steppe.cli import app
from steppe.errors import UserError
from steppe.options import Option
from steppe.sweeps import (
    Crew,
    Grid,
    Sweep,
    launch,
    launchers,
    look,
    register_launcher,
    run_sweep,
    write_plan,
)
from tests.limits import seconds

GUIDE = Path(__file__).parents[2] / "docs/guide/sweeps.md"


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    small = ("steps=1", "batch_size=4")
    grid = Grid(("RotatedDigits",), trials=1, draws=1, targets="75", overrides=small)
    return write_plan(grid, tmp_path / "sweep")


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_the_guides_launcher_is_a_plugin_and_carries_a_sweep_out(sweep, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "my_launchers.py").write_text(code)
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$1" >> hosts\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launchers, "_entries", dict(launchers._table))  # the plugin's goes after it
    plugin = ("--plugin", "my_launchers")
    assert "ssh: where to start a worker" in typed("sweep", "run", *plugin, "--help").stdout
    ran = typed("sweep", "run", *plugin, "--launcher", "ssh", "--host", "node1", sweep.path)
    assert ran.exit_code == 0
    assert (tmp_path / "hosts").read_text() == "node1\n"
    assert look(sweep).complete


def test_an_option_without_a_default_is_a_text(sweep, monkeypatch):
    monkeypatch.setattr(launchers, "_entries", dict(launchers._table))

    @register_launcher("queued")
    class Queued:
        """Submits workers to a queue."""

        def __init__(self, *, queue: Annotated[str | None, Option()] = None) -> None:
            self.queue = queue

        def start(self, sweep, crew, show):
            return f"submitted to {self.queue}"

    assert run_sweep(sweep, "queued", queue=None) == "submitted to None"
    ran = typed("sweep", "run", sweep.path, "--launcher", "queued", "--queue", "short")
    assert (ran.exit_code, ran.stdout) == (0, "submitted to short\n")


def test_without_a_terminal_a_line_tells_now_and_then_how_far_it_is(sweep, monkeypatch, capsys):
    """As under nohup: at once, when something changed, and after a long silence."""
    now = look(sweep)
    (name,) = sweep.names
    at_work = replace(now, counts={**now.counts, "planned": 0, "running": 1}, running={name: 1.0})
    clock = [0.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(launchers, "_entries", dict(launchers._table))

    @register_launcher("told")
    class Told:
        def start(self, sweep, crew, show):
            for status, seconds_later in ((now, 0), (at_work, 5), (at_work, 6), (at_work, 100)):
                clock[0] += seconds_later
                show(status)
            clock[0] += launch.STILL_SECONDS
            show(at_work)
            return now

    assert launch.run(sweep.path, "told", Crew()) is False
    lines = [line for line in capsys.readouterr().err.splitlines() if "; " in line]
    told = f"{sweep.path}: 1 running; 0 of 1 runs (0%), 0.0 runs/h, ? left"
    assert lines == [told.replace("running", "planned"), told, told]


def test_an_option_that_sweep_run_already_has_is_refused_when_it_is_registered(monkeypatch):
    monkeypatch.setattr(launchers, "_entries", dict(launchers._table))
    taken = {option.name for option in get_command(app).commands["sweep"].commands["run"].params}
    assert {"path", "workers", "launcher", "plugin"} <= taken
    for name in taken | {"crew", "show", "help"}:

        class Shadowing:
            def __init__(self, **options) -> None: ...

        option = Parameter(
            name, Parameter.KEYWORD_ONLY, default=1, annotation=Annotated[int, Option()]
        )
        Shadowing.__init__.__signature__ = Signature([option])
        with pytest.raises(UserError, match=f"'shadowing' cannot have an option '{name}'"):
            register_launcher("shadowing")(Shadowing)
    assert "shadowing" not in launchers


def test_an_option_of_another_launcher_is_refused(sweep):
    options = {"local": [], "ray": ["address"], "slurm": ["sbatch", "dry_run"]}
    assert {name: list(launchers[name].options) for name in options} == options
    with pytest.raises(UserError, match="--dry-run is for --launcher slurm, not local"):
        typed("sweep", "run", sweep.path, "--dry-run")
    with pytest.raises(UserError, match="--address is for --launcher ray, not slurm"):
        typed("sweep", "run", "--launcher", "slurm", "--address", "auto", sweep.path)
    with pytest.raises(UserError, match="unknown launcher 'slrum', did you mean 'slurm'"):
        run_sweep(sweep, "slrum")
    with pytest.raises(UserError, match="unknown option for launcher 'slurm': 'queue'"):
        run_sweep(sweep, "slurm", queue="long")


def test_to_read_a_sweep_and_to_list_launchers_needs_neither_torch_nor_ray(sweep):
    code = f"""if True:
        import sys
        from pathlib import Path
        from steppe.console import stdout
        from steppe.sweeps import launchers, look, read_plan
        from steppe.sweeps.status import show
        sweep = read_plan(Path({str(sweep.path)!r}))
        stdout().print(show(sweep, look(sweep)))
        print(*launchers)
        sys.exit(bool({{"torch", "ray", "pydantic"}} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(100)
    )
    assert done.returncode == 0, done.stderr
    assert "0 of 1 runs" in done.stdout
    assert done.stdout.endswith("local ray slurm\n")
