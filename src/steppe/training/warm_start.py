"""A warm start: train the classifier alone before the algorithm trains the whole network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steppe.algorithms import Algorithm, Objective
from steppe.algorithms.algorithm import LINEAR, trainable


def with_warm_start(algorithm: Algorithm, steps: int, lr: float) -> tuple[Objective, ...]:
    """The objectives of an algorithm, `steps` later, with the classifier's before them.

    The classifier has its own optimizer, whose learning rate is `lr`. The algorithm's steps count
    from the end of the warm start.
    """
    own = tuple(algorithm.objectives())
    if not steps:
        return own
    return (
        Objective(
            LINEAR,
            tuple(trainable(algorithm.network.classifier)),
            active=lambda step: step < steps,
            options={"lr": lr},
        ),
        *later(own, steps),
    )


def first_change(objectives: Sequence[Objective], steps: int, whole: bool) -> int:
    """The first step that changes the network, or the whole of it; `steps` if none does."""
    own = [one for one in objectives if one.name != LINEAR or not whole]
    first = next((one for one in own if one.name in (LINEAR, "main")), own[0])
    return next(filter(first.active, range(steps)), steps)


def later(objectives: Sequence[Objective], steps: int) -> list[Objective]:
    """The same objectives, with a schedule that begins after some steps."""

    def shifted(one: Objective) -> Objective:
        return replace(
            one,
            active=lambda step: step >= steps and one.active(step - steps),
            reset=lambda step: step >= steps and one.reset(step - steps),
            lr_steps={step + steps: factor for step, factor in one.lr_steps.items()},
        )

    return [shifted(one) for one in objectives]
