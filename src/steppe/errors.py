"""Errors that are not bugs."""

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong value from the user; the message says what to do about it.

    The command line prints it on one line and exits with 2.
    """


class RunError(RuntimeError):
    """A run failed: its loss diverged, the disk is full, or every checkpoint is damaged.

    The command line prints it on one line and exits with 1. The run's files stay.
    """


class Diverged(RunError):
    """The loss, or a measurement on the training domains, is no longer finite."""


class Interrupted(BaseException):
    """A signal stopped a run, which has saved its state and can be resumed.

    Like KeyboardInterrupt, not an `Exception`: only the outermost caller should catch it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number
        """The exit status that a shell reports for a process killed by the signal."""

    def __str__(self) -> str:
        return signal.Signals(self.args[0]).name


def reason(error: Exception) -> str:
    """The message of an error on one line, without an OSError's file name."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


LONGEST = 80
"""Maximum length of a value in a message."""


def shown(value: object) -> str:
    """The `repr` of a value, shortened for a message.

    Examples:
        >>> print(shown("sketch"), shown(10**30_000), shown(list(range(1000))), sep="; ")
        'sketch'; a number of thousands of digits; [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to convert it
        return "a number of thousands of digits"
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}..."


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest known one.

    A known name with a dot, such as optimizer.rho, also matches by its last part.

    Examples:
        >>> unknown("search space", "fiar", ["fad", "domainbed", "fair"])
        "unknown search space 'fiar', did you mean 'fair'? Known: fad, domainbed, fair"
    """
    names = list(known)
    by_lower = {known_name.lower().rpartition(".")[2]: known_name for known_name in names[::-1]}
    by_lower |= {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower().replace("_", "-"), by_lower, n=1)
    close = close or difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f", did you mean {by_lower[close[0]]!r}?" if close else "."
    return f"unknown {kind} {shown(name)}{hint} Known: {', '.join(names)}"
