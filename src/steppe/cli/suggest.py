"""Suggest the closest command for a mistyped one."""

from __future__ import annotations

import difflib
from typing import Any

from typer.core import TyperGroup

from .listing import KINDS


class Commands(TyperGroup):
    """The top-level commands. Suggestions include subcommands and the lists of `steppe list`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        typed = args[0]
        if self.get_command(ctx, typed) is None and not typed.startswith("-"):
            known = {kind: [f"list {kind}"] for kind in KINDS}
            for name, command in self.commands.items():
                for below in getattr(command, "commands", ()):
                    known.setdefault(below, []).append(f"{name} {below}")
            known |= {name: [name] for name in self.commands}
            close = difflib.get_close_matches(typed.lower(), known, n=1)
            meant = " or ".join(f"'steppe {one}'" for one in known[close[0]]) if close else ""
            hint = f"Did you mean {meant}?" if close else "See 'steppe --help'."
            ctx.fail(f"No such command {typed!r}. {hint}")
        return super().resolve_command(ctx, args)
