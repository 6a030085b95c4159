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
        seconds: the time of its updates and evaluations.
        probe: what its linear probe chose, if it had one.
    """

    schedule: Replay
    validated: float | None
    seconds: float
    probe: dict[str, float] | None

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> FirstStage:
        """From the records of the first stage, which is done."""
        seconds, before = 0.0, -1
        for record in records:
            seconds += record["seconds_per_step"] * (record["step"] - before)
            seconds += record["evaluation_seconds"]
            before = record["step"]
        validated = validation_accuracy(records[-1])
        return cls(Replay(records), validated, seconds, records[0].get("probe"))

    def to_json(self) -> dict[str, float]:
        """What the records of the second stage say about the first."""
        said = {"first_stage_validation": self.validated, "first_stage_seconds": self.seconds}
        return {key: value for key, value in said.items() if value is not None}


def first_config(config: RunConfig) -> RunConfig:
    """The first stage of a run that has two."""
    return config.model_copy(update={"second_stage": False, "resolved": None})
