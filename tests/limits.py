"""How long a test waits before it takes something for hung: one variable scales all of it.

Such a limit is ten times what the thing normally takes, or more. ``STEPPE_TEST_PATIENCE=5`` makes
every limit five times as long, for a machine that is slow or busy.
"""

import os

PATIENCE = float(os.environ.get("STEPPE_TEST_PATIENCE", "1"))


def seconds(normal: float) -> float:
    """A limit for something that should take a tenth of it."""
    return normal * PATIENCE
