"""Recalls of single tokens are planned for all KV heads at once: against sets, and by the number of calls."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np

from kvlens.memory.zones import TokenPlan, TokenZone

FIRST = 7


def draw_requests(generator: np.random.Generator, heads: int, width: int, positions: int) -> np.ndarray:
    """Return positions int64 [heads, width], none twice in a row; -1: nothing."""
    rows = np.stack([generator.permutation(positions)[:width] for _ in range(heads)])
    return np.where(generator.random(rows.shape) < 0.2, -1, rows)


def test_a_plan_equals_plain_sets() -> None:
    generator = np.random.default_rng(4)
    heads, size, width = 5, 9, 8
    zone, slots = TokenZone(FIRST, size, heads), [[-1] * size for _ in range(heads)]
    for _ in range(30):
        due = np.flatnonzero(generator.random(heads) < 0.7)
        requested = draw_requests(generator, heads, width, 24)
        plan = zone.plan(requested, due)
        expected_new, expected_freed = [], []
        for head in due.tolist():
            wishes = set(requested[head][requested[head] >= 0].tolist())
            row = slots[head]
            missing = sorted(wishes - set(row))
            for slot, position in enumerate(row):
                if position >= 0 and position not in wishes:
                    row[slot] = -1
                    expected_freed.append((head, FIRST + slot))
            for position in missing:
                slot = row.index(-1)
                row[slot] = position
                expected_new.append((head, position, FIRST + slot))
        assert list(zip(plan.heads.tolist(), plan.positions.tolist(), plan.slots.tolist(), strict=True)) == expected_new
        assert list(zip(*plan.freed.tolist(), strict=True)) == expected_freed
        assert zone.position.tolist() == slots


def count_calls(heads: int) -> int:
    zone, generator, calls = TokenZone(0, 16, heads), np.random.default_rng(1), [0]
    requests = [draw_requests(generator, heads, 12, 60) for _ in range(3)]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    plans: list[TokenPlan] = []
    sys.setprofile(note)
    try:
        for requested in requests:
            plans.append(zone.plan(requested, np.arange(heads)))
    finally:
        sys.setprofile(None)
    assert all(len(plan.heads) for plan in plans)
    return calls[0]


def test_a_plan_takes_as_many_calls_for_many_kv_heads_as_for_two() -> None:
    assert count_calls(64) == count_calls(2)
