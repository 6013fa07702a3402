"""Arithmetic of stretches of time: how long they cover together, how much of that passed beside something else, and how
to draw them without overlap."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


def covered(starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of the stretches [start, end]: where several overlap, the time counts once."""
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    first_starts, last = np.asarray(starts, np.float64)[order], np.asarray(ends, np.float64)[order]
    latest_end = np.concatenate([[-np.inf], np.maximum.accumulate(last)[:-1]])
    return float(np.maximum(last - np.maximum(first_starts, latest_end), 0).sum())


def lanes(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each stretch the number of the first lane that is free when it begins, so that no two of a lane overlap."""
    lane_numbers = np.zeros(len(starts), np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for place in np.lexsort((ends, starts)):
        while busy and busy[0][0] <= starts[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        lane_numbers[place] = lane
        heapq.heappush(busy, (float(ends[place]), lane))
    return lane_numbers


@dataclass(frozen=True)
class Overlap:
    """What moved in the time from the begin of some steps to their end, in us."""

    moving: float
    """during which at least one copy was under way"""
    blocking: float
    background: float
    """the same for blocking copies alone, for background copies alone"""
    waited: float
    """how long the engine stood still for copies"""
    unwaited: float
    """moving time that passed while the engine did not stand still for a copy, at the least"""


def overlap(
    start: np.ndarray, dur: np.ndarray, wait: np.ndarray, starts: np.ndarray, ends: np.ndarray, blocking: np.ndarray
) -> Overlap:
    """Sums over consecutive steps (start, duration, time waited) and the copies (begin, end, whether the engine waits
    for them) that may have run in their time, us.

    A step's wait can also cover queueing and unpacking, during which nothing moves, and where in the step it fell is
    not recorded: what is left of the step's moving time once all its waiting is taken off is therefore a lower bound.
    Between steps the engine waits for none."""
    end = start + dur

    def moving(indices: np.ndarray, begin: float, last: float) -> float:
        return covered(starts[indices].clip(begin, last), ends[indices].clip(begin, last))

    everything = np.ones(len(starts), bool)
    inside = [moving(everything, *edges) for edges in zip(start, end, strict=True)]
    whole = (start[0], end[-1])
    total = moving(everything, *whole)
    return Overlap(
        total,
        moving(blocking, *whole),
        moving(~blocking, *whole),
        float(wait.sum()),
        total - sum(inside) + sum(max(0.0, time - waited) for time, waited in zip(inside, wait, strict=True)),
    )
