"""The errors that are not bugs."""

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong value from the person at the keyboard; the message says what to do about it.

    The command line prints it on one line and exits with 2. Every other exception is a bug and
    keeps its traceback.
    """


class RunError(RuntimeError):
    """A run stopped: its loss diverged, the disk is full, every checkpoint is damaged.

    The command line prints it on one line and exits with 1; what the run has written stays.
    """


class Diverged(RunError):
    """The loss, or what is measured on the training domains, is no longer finite."""


class Interrupted(BaseException):
    """A run was asked to stop by a signal, has saved its state and can be resumed.

    Not an `Exception`, like KeyboardInterrupt: nothing but the outermost caller should catch it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number
        """The exit status that a shell gives a process ended by the signal."""

    def __str__(self) -> str:
        return signal.Signals(self.args[0]).name


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that is not in a table, with the closest one that is.

    Examples:
        >>> unknown("search space", "fiar", ["fad", "domainbed", "fair"])
        "unknown search space 'fiar', did you mean 'fair'? Known: fad, domainbed, fair"
    """
    names = list(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower().replace("_", "-"), by_lower, n=1)
    close = close or difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f", did you mean {by_lower[close[0]]!r}?" if close else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}"
