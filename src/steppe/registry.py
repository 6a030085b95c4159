"""A table of names and what stands behind them: one for every axis, and for launchers.

A name is found in any case of letters. A wrong one is answered with the nearest that exists, and a
plugin adds entries as steppe's own files do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Generic, Protocol, TypeVar

from steppe.errors import UserError, unknown


class Entry(Protocol):
    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries by name, in the order in which they were added.

    Args:
        kind: what they are, for messages.
        entries: a function that returns the first ones, called when a name is first asked for.

    Examples:
        >>> from steppe.search import spaces
        >>> list(spaces)
        ['fair', 'fad', 'domainbed']
        >>> spaces["fiar"]
        Traceback (most recent call last):
        steppe.errors.UserError: unknown search space 'fiar', did you mean 'fair'? Known: ...
    """

    def __init__(self, kind: str, entries: Callable[[], Iterable[E]] = tuple) -> None:
        self.kind, self._first, self._lock = kind, entries, Lock()
        self._entries: dict[str, E] | None = None
        self._added: set[str] = set()

    def add(self, entry: E) -> E:
        """Adds an entry, or replaces one that was added: a notebook's cell may run again."""
        if entry.name in self and entry.name.lower() not in self._added:
            raise UserError(f"{self.kind} {entry.name!r} is known already: choose another name")
        self._added.add(entry.name.lower())
        self._table[entry.name.lower()] = entry
        return entry

    def __getitem__(self, name: str) -> E:
        try:
            return self._table[name.lower()]
        except KeyError:
            raise UserError(unknown(self.kind, name, self)) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._table

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._table.values())

    def __len__(self) -> int:
        return len(self._table)

    def entries(self) -> Iterator[E]:
        yield from self._table.values()

    @property
    def _table(self) -> dict[str, E]:
        with self._lock:
            if self._entries is None:
                self._entries = {entry.name.lower(): entry for entry in self._first()}
            return self._entries
