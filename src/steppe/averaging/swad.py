"""SWAD: the mean of all weights in a valley of the validation loss."""

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor, nn

from steppe.options import Option

from .averaging import Averaging
from .batchnorm import unfrozen
from .mean import Mean
from .registry import averages, register_averaging
from .valley import VALLEYS, Decision


@register_averaging(
    "swad", citation="Cha et al., SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021"
)
class SWAD(Averaging):
    r"""Stochastic weight averaging densely (Cha et al., NeurIPS 2021).

    SWAD averages every iterate of a segment, the steps between two evaluations of the validation
    loss, and `steppe.averaging.valley` selects the segments that enter the final average. The
    average is ready after `finish`; until then, predictions use the live weights. Iterates after
    the last evaluation are left out.

    Only parameters are averaged: `needs_statistics` is true if any batch norm is not frozen.

    Memory: parameter-sized buffers for the current segment, for each segment that may still enter
    the average, and for the average. At most ``max(n_converge, n_tolerance) + 1`` at a time, 7 by
    default; segment buffers are freed once the valley ends.

    Args:
        module: the module to average, in training mode.
        every: steps between evaluations. The paper uses 100, but 50 for VLCS and 500 for DomainNet.
        n_converge: \(N_s\), the optimum patience, in evaluations.
        n_tolerance: \(N_e\), the overfit patience, in evaluations.
        tolerance: \(r\): the valley ends when losses exceed \(1 + r\) times the mean loss at its
            start. The paper calls our \(1 + r\) \(r\): 1.3, and 1.2 for VLCS.
        counting: `reference` adds segments as the authors' code does, some more than once, all
            with equal weight; `paper` averages every iterate of the valley once.
    """

    follows_loss = True

    def __init__(
        self,
        module: nn.Module,
        every: Annotated[int, Option(low=1)] = 100,
        n_converge: Annotated[int, Option(low=1)] = 3,
        n_tolerance: Annotated[int, Option(low=1)] = 6,
        tolerance: Annotated[float, Option(above=0)] = 0.3,
        counting: Annotated[str, Option(choices=tuple(VALLEYS))] = "reference",
    ) -> None:
        search = {"n_converge": n_converge, "n_tolerance": n_tolerance, "tolerance": tolerance}
        averages["swad"].check({"every": every, "counting": counting, **search})
        super().__init__(module)
        self.every = every
        self.valley = VALLEYS[counting](n_converge, n_tolerance, tolerance)
        self._unfrozen = bool(unfrozen(module))
        self._running = Mean()
        self._segments: dict[int, Mean] = {}
        self._total = Mean()
        self._settled = False

    def update(self) -> None:
        self._check_live("update()")
        if self._settled:
            raise RuntimeError("update() after finish(): the average is final")
        if not self.finished:
            self._running.add(list(self.tensors.values()))

    def due(self, step: int, last: bool) -> bool:
        return step % self.every == 0 or last

    def observe(self, step: int, loss: float) -> None:
        """End the current segment."""
        if self._settled or self.finished:
            return
        if not self._running.weight:
            raise RuntimeError(f"observe() at step {step} without an update() since the last one")
        self._segments[self.valley.looks], self._running = self._running, Mean()
        self._carry_out(self.valley.look(loss))

    @property
    def finished(self) -> bool:
        return self.valley.dead

    def finish(self) -> None:
        self._check_live("finish()")
        if self._settled:
            return
        if self.valley.looks:
            self._running = Mean()
            self._carry_out(self.valley.end())
        else:
            self._total, self._running = self._running, Mean()
        self._segments = {}
        self._settled = True

    def outcome(self) -> str:
        if self.valley.start is None:
            return (
                f"the validation loss did not converge within {self.valley.looks} evaluations, so "
                "SWAD found no valley. Train longer, or evaluate more often (averaging.every)."
            )
        begins = self.valley.start * self.every
        ends = "and ended before the run did" if self.finished else "and lasted to the end"
        return f"the loss valley begins after step {begins} {ends}"

    @property
    def serving(self) -> bool:
        return self._settled and self._total.weight > 0

    @property
    def needs_statistics(self) -> bool:
        return self._unfrozen

    def state_dict(self) -> dict[str, Any]:
        self._check_live("state_dict()")
        return {
            "served": self._named(self._total.tensors) if self.serving else None,
            "settled": self._settled,
            "total": None if self._settled else self._saved(self._total),
            "running": self._saved(self._running),
            "segments": [
                {"number": number, **(self._saved(segment) or {})}
                for number, segment in self._segments.items()
            ],
            "valley": self.valley.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_live("load_state_dict()")
        served = state["served"]
        total = state["total"] if served is None else {"weight": 1, "tensors": served}
        self._total = self._restored(total)
        self._running = self._restored(state["running"])
        self._segments = {saved["number"]: self._restored(saved) for saved in state["segments"]}
        self._settled = state["settled"]
        self.valley.load_state_dict(state["valley"])

    def _carry_out(self, decision: Decision) -> None:
        if decision.restart:
            self._total = Mean()
        self._keep(self.valley.needed.union(decision.add))  # first, to make room
        for number in decision.add:
            segment = self._segments[number]
            self._total.add(segment.tensors, segment.weight if self.valley.by_iterates else 1)
        self._keep(self.valley.needed)

    def _keep(self, numbers: frozenset[int]) -> None:
        self._segments = {n: segment for n, segment in self._segments.items() if n in numbers}

    def _saved(self, mean: Mean) -> dict[str, Any] | None:
        if not mean.weight:
            return None
        return {"weight": mean.weight, "tensors": self._named(mean.tensors)}

    def _restored(self, saved: Mapping[str, Any] | None) -> Mean:
        return Mean() if saved is None else Mean(self._own(saved["tensors"]), saved["weight"])

    def _average(self) -> list[Tensor]:
        return self._total.tensors
