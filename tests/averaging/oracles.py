"""Which segments SWAD averages, spelled out slowly from the rules, with the whole curve at hand."""

from __future__ import annotations

from collections import deque

import numpy as np


def reference(losses, n_s, n_e, r):
    """The segments that the authors' code adds, and the look at which its valley is dead.

    Their average starts as a copy of the convergence segment that counts zero times, so that the
    first segment to be added takes its place.
    """
    converge, smooth = deque(maxlen=n_s), deque(maxlen=n_e)
    copied, added = None, []
    at = threshold = dead_at = None
    for number, loss in enumerate(losses):
        if dead_at is not None:
            break
        converge.append((number, loss))
        smooth.append((number, loss))
        if at is None:
            if len(converge) < n_s or np.argmin([value for _, value in converge]) != 0:
                continue
            at = copied = converge[0][0]
            threshold = np.mean([value for _, value in converge]) * (1 + r)
            if n_e < n_s:
                added += [converge[1 + i][0] for i in range(n_s - n_e)]
            if n_e > n_s:
                q = [smooth[i] for i in range(n_e - n_s + 1) if i < len(smooth)]
                start = 0
                for i in range(len(q)):
                    if q[i][1] > threshold:
                        start = i + 1
                added += [q[i][0] for i in range(start + 1, len(q))]
        elif smooth[0][0] < at:
            continue
        elif min(value for _, value in smooth) > threshold:
            dead_at = number
        else:
            added.append(smooth[0][0])
    if at is None:
        return [converge[-1][0]], None
    if dead_at is None:
        smooth.popleft()
        while smooth and not min(value for _, value in smooth) > threshold:
            added.append(smooth.popleft()[0])
    return added or [copied], dead_at


def paper(losses, n_s, n_e, r):
    """Algorithm 1 of the paper, look by look: the segments t_s to t_e, and where it stops."""
    start, end, threshold = 0, len(losses) - 1, None
    for i in range(len(losses)):
        if threshold is None:
            if i - n_s + 1 >= 0 and losses[i - n_s + 1] == min(losses[i - n_s + 1 : i + 1]):
                start = i - n_s + 1
                threshold = np.mean(losses[start : i + 1]) * (1 + r)
        elif i - n_e + 1 >= 0 and threshold < min(losses[i - n_e + 1 : i + 1]):
            end = i - n_e
            return list(range(start, end + 1)), i
    return list(range(start, end + 1)), None


ORACLES = {"reference": reference, "paper": paper}
