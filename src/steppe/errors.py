"""The error that is the user's to mend."""


class UserError(ValueError):
    """A wrong value from the person at the keyboard; the message says what to do about it.

    The command line prints it on one line and exits with 2. Every other exception is a bug and
    keeps its traceback.
    """
