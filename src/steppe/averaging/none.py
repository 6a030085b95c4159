"""No averaging: predictions use the live weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .averaging import Averaging
from .registry import register_averaging


@register_averaging("none")
class NoAveraging(Averaging):
    """Average nothing, at no cost."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.tensors = {}

    def update(self) -> None:
        pass

    @property
    def serving(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"served": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def _average(self) -> list[Tensor]:
        return []
