"""The registry behind every axis. Plugins can add entries.

Names are case-insensitive, and a hyphen equals an underscore.
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
    """Entries by name, in the order of registration.

    Args:
        kind: what an entry is called in messages.
        entries: returns the initial entries; called on first use.

    Examples:
        >>> from steppe.search import spaces
        >>> list(spaces)
        ['fair', 'fad', 'domainbed', 'yu2024']
        >>> spaces["fiar"]
        Traceback (most recent call last):
        steppe.errors.UserError: unknown search space 'fiar', did you mean 'fair'? Known: ...
    """

    def __init__(self, kind: str, entries: Callable[[], Iterable[E]] = tuple) -> None:
        self.kind, self._first, self._lock = kind, entries, Lock()
        self._entries: dict[str, E] | None = None
        self._added: set[str] = set()

    def add(self, entry: E) -> E:
        """Add an entry, or replace one that was added before, as when a notebook cell reruns."""
        if entry.name in self and _key(entry.name) not in self._added:
            raise UserError(f"{self.kind} {entry.name!r} already exists: choose another name")
        self._added.add(_key(entry.name))
        self._table[_key(entry.name)] = entry
        return entry

    def __getitem__(self, name: str) -> E:
        try:
            return self._table[_key(name)]
        except KeyError:
            raise UserError(unknown(self.kind, name, self)) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self._table

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
                self._entries = {_key(entry.name): entry for entry in self._first()}
            return self._entries


def _key(name: str) -> str:
    return name.lower().replace("_", "-")
