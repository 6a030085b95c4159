r"""SWAD's search for the loss valley, without tensors: which segments of training to average.

Evaluations of the validation loss ("looks") cut training into segments; segment 0 ends with the
first look. The valley starts at a loss that none of the next \(N_s - 1\) losses falls below. It
ends when \(N_e\) losses in a row exceed the threshold, \(1 + r\) times the mean of those \(N_s\).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple


class Look(NamedTuple):
    """A segment and the validation loss at its end."""

    number: int
    loss: float


class Decision(NamedTuple):
    """The segments to average now, possibly repeated, and whether to discard earlier ones."""

    add: tuple[int, ...] = ()
    restart: bool = False


class Valley(ABC):
    r"""Finds the valley during training, given \(N_s, N_e, r\).

    Attributes:
        looks: number of losses seen so far, which is the number of the current segment.
        start: the convergence segment; None until it is found.
        threshold: the highest loss inside the valley; None until the start is found.
        dead: whether the valley has ended, so that later losses have no effect.
        added: number of segments added, including repetitions.
    """

    by_iterates: ClassVar[bool]
    """Whether segments are weighted by their number of iterates instead of equally."""

    def __init__(self, n_converge: int = 3, n_tolerance: int = 6, tolerance: float = 0.3) -> None:
        self.n_converge, self.n_tolerance, self.tolerance = n_converge, n_tolerance, tolerance
        self.looks = 0
        self.start: int | None = None
        self.threshold: float | None = None
        self.dead = False
        self.added = 0
        self._recent: deque[Look] = deque(maxlen=max(n_converge, n_tolerance))

    def look(self, loss: float) -> Decision:
        """Process the loss at the end of segment `looks`.

        The decision adds only the segment that just ended, or segments that were `needed`.
        """
        if self.dead:
            return Decision()
        self._recent.append(Look(self.looks, loss))
        self.looks += 1
        if self.start is not None and self.threshold is not None:
            return self._noted(self._follow(self.start, self.threshold))
        window = self._last(self.n_converge)
        if len(window) < self.n_converge or any(look.loss < window[0].loss for look in window):
            return self._noted(self._wait())
        self.start = window[0].number
        # A loop, because rounding in `sum` differs between Python versions.
        total = 0.0
        for look in window:
            total += look.loss
        self.threshold = total / self.n_converge * (1.0 + self.tolerance)
        return self._noted(self._converge(window, self.threshold))

    def end(self) -> Decision:
        """Decide what to add at the end of training; call once."""
        return self._noted(self._drain())

    @property
    @abstractmethod
    def needed(self) -> frozenset[int]:
        """The past segments that a later decision may add."""

    def _wait(self) -> Decision:
        """Decide after a look without convergence."""
        return Decision()

    @abstractmethod
    def _converge(self, window: list[Look], threshold: float) -> Decision:
        """Decide after the look that found convergence."""

    @abstractmethod
    def _follow(self, start: int, threshold: float) -> Decision:
        """Decide after a look inside the valley."""

    @abstractmethod
    def _drain(self) -> Decision:
        """Decide at the end of training."""

    def _last(self, n: int) -> list[Look]:
        return list(self._recent)[-n:]

    def _noted(self, decision: Decision) -> Decision:
        self.added = (0 if decision.restart else self.added) + len(decision.add)
        return decision

    def state_dict(self) -> dict[str, Any]:
        kept = ("looks", "start", "threshold", "dead", "added")
        losses = [look.loss for look in self._recent]
        return {**{name: getattr(self, name) for name in kept}, "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.looks, self.added = state["looks"], state["added"]
        self.start, self.threshold, self.dead = state["start"], state["threshold"], state["dead"]
        first = self.looks - len(state["losses"])
        self._recent.clear()
        self._recent.extend(Look(first + i, loss) for i, loss in enumerate(state["losses"]))


class ReferenceValley(Valley):
    r"""Counts segments like the authors' published code, including its quirks.

    Two queues hold the last \(N_s\) and the last \(N_e\) segments. After convergence, every look
    adds the head of the second queue, which stays until the full queue moves on. As a result, some
    segments are averaged more than once:

    - the convergence segment, when convergence is found and again as the head;
    - the first segments, if convergence comes before the queue is full, because its head stays;
    - those before the convergence segment, if training ends before that becomes the head.

    With \(N_e \le N_s\), the convergence segment is left out: the code starts the average as a
    copy of that segment with weight zero, so the first added segment replaces it.

    Examples:
        >>> valley = ReferenceValley(n_converge=2, n_tolerance=3)
        >>> [valley.look(loss).add for loss in (2.0, 1.2, 1.0, 1.1, 1.1)]
        [(), (), (), (2,), (2,)]
        >>> valley.end().add
        (3, 4)
    """

    by_iterates = False

    @property
    def needed(self) -> frozenset[int]:
        """The queued segments that the next look does not drop, and the stand-in."""
        if self.dead:
            return frozenset()
        converged = self.start is not None
        length = self.n_tolerance if converged else max(self.n_converge, self.n_tolerance)
        queued = range(max(self.looks - length + 1, 0), self.looks)
        return frozenset((*queued, *self._stand_in()))

    def _converge(self, window: list[Look], threshold: float) -> Decision:
        behind = self.n_tolerance - self.n_converge
        if behind < 0:
            # The second queue is too short for these ever to become its head.
            return Decision(_numbers(window[1 : 1 - behind]))
        if behind == 0:
            return Decision()
        # Go back from the convergence segment, but not past a loss above the threshold. The authors
        # index from the convergence segment of a full queue; in a shorter one, `back` goes beyond.
        back = self._last(self.n_tolerance)[: behind + 1]
        above = [i for i, look in enumerate(back) if look.loss > threshold]
        first = above[-1] + 1 if above else 0
        return Decision(_numbers(back[first + 1 :]))

    def _follow(self, start: int, threshold: float) -> Decision:
        queue = self._last(self.n_tolerance)
        if queue[0].number < start:
            return Decision()
        if min(look.loss for look in queue) > threshold:
            decision = Decision(self._stand_in())
            self.dead = True
            return decision
        return Decision((queue[0].number,))

    def _drain(self) -> Decision:
        if self.dead or not self.looks:
            return Decision()
        if self.threshold is None:  # never converged: the last segment
            return Decision((self.looks - 1,))
        # The authors' code drops the head, whether or not it was added.
        queue = self._last(self.n_tolerance)[1:]
        while queue and queue[-1].loss > self.threshold:
            queue.pop()
        return Decision(_numbers(queue) or self._stand_in())

    def _stand_in(self) -> tuple[int, ...]:
        """The convergence segment until one is added: it is the average if none ever is."""
        return () if self.start is None or self.added else (self.start,)


class PaperValley(Valley):
    r"""Counts every iterate once, like Algorithm 1 of the paper with looks instead of iterations.

    The average starts with the convergence segment and ends before the first \(N_e\) losses in a
    row above the threshold, counted from the look after the one that found convergence. Otherwise
    it continues to the end of training. Without convergence, everything is averaged.

    Examples:
        >>> valley = PaperValley(n_converge=2, n_tolerance=3)
        >>> [valley.look(loss).add for loss in (3.0, 2.0, 1.0, 1.1, 2.0)]
        [(), (0,), (1,), (2, 3), ()]
        >>> valley.end().add
        (4,)
    """

    by_iterates = True

    _next = 0  # the first segment neither added nor dropped

    @property
    def needed(self) -> frozenset[int]:
        """The candidates for the start of the valley, or for its end."""
        return frozenset(() if self.dead else range(self._next, self.looks))

    def _wait(self) -> Decision:
        # Average everything that cannot be the start, in case convergence never comes.
        return Decision(self._until(self.looks - self.n_converge + 1))

    def _converge(self, window: list[Look], threshold: float) -> Decision:
        self._next = window[0].number
        return Decision(self._settled(threshold), restart=True)

    def _follow(self, start: int, threshold: float) -> Decision:
        if self._above(threshold) >= self.n_tolerance:
            self.dead = True
            return Decision()
        return Decision(self._settled(threshold))

    def _drain(self) -> Decision:
        return Decision(() if self.dead else self._until(self.looks))

    def _settled(self, threshold: float) -> tuple[int, ...]:
        """Add all segments that cannot be among the last N_e above the threshold."""
        return self._until(self.looks - min(self._above(threshold), self.n_tolerance - 1))

    def _above(self, threshold: float) -> int:
        """Count the most recent consecutive losses above the threshold."""
        count = 0
        for look in reversed(self._recent):
            # Negative losses put the threshold below their mean; the start still counts as inside.
            if look.number == self.start or look.loss <= threshold:
                break
            count += 1
        return count

    def _until(self, end: int) -> tuple[int, ...]:
        segments = tuple(range(self._next, end))
        self._next = max(self._next, end)
        return segments

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next = state["next"]


def _numbers(looks: list[Look]) -> tuple[int, ...]:
    return tuple(look.number for look in looks)


VALLEYS: Mapping[str, type[Valley]] = {"reference": ReferenceValley, "paper": PaperValley}
