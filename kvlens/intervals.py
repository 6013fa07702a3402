"""Arithmetic of stretches of time: how long they cover together, and how to draw them without overlap."""

from __future__ import annotations

import heapq

import numpy as np


def covered(starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of the stretches [start, end]: where several overlap, the time counts once."""
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    first, last = np.asarray(starts, np.float64)[order], np.asarray(ends, np.float64)[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(last)[:-1]])
    return float(np.maximum(last - np.maximum(first, before), 0).sum())


def lanes(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each stretch the number of the first lane that is free when it begins, so that no two of a lane overlap."""
    chosen = np.zeros(len(starts), np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for place in np.lexsort((ends, starts)):
        while busy and busy[0][0] <= starts[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        chosen[place] = lane
        heapq.heappush(busy, (float(ends[place]), lane))
    return chosen
