"""The second stage of a run: train again on all source images, with what the first one chose.

The first stage is a run like any other, in a subfolder of the second's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config import RunConfig
from .directory import validation_accuracy
from .schedules import Replay


@dataclass(frozen=True)
class FirstStage:
    """What the second stage needs from the first.

    Attributes:
        schedule: its learning rates, and the step after which it ended.
        validated: its last validation accuracy, by which reports choose between runs.
        probe: what its linear probe chose, if it had one.
    """

    schedule: Replay
    validated: float | None
    probe: dict[str, float] | None

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> FirstStage:
        """From the records of the first stage, which is done."""
        return cls(Replay(records), validation_accuracy(records[-1]), records[0].get("probe"))


def first_config(config: RunConfig) -> RunConfig:
    """The first stage of a run that has two."""
    return config.model_copy(update={"second_stage": False, "resolved": None})
