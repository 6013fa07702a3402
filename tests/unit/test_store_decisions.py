"""Decisions come back as they were logged, and what does not add up is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_support import make_decisions, make_step, write

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS, Decisions
from kvlens.store.errors import TraceError
from kvlens.store.spanlists import copied_decisions

SIZES = 3, 4, 2, 2
STEPS = 7


Row = tuple[int | str | tuple[int, ...], ...]


def rows_of(step: int, decisions: Decisions) -> list[Row]:
    """The rows as a trace holds them, without their figures."""
    ids = np.stack([decisions.layer, decisions.kv_head, decisions.candidates, decisions.requested, decisions.granted])
    lists = [
        np.split(flat, np.cumsum(counts)[:-1])
        for flat, counts in ((decisions.refused_span, decisions.refused), (decisions.missed_span, decisions.missed))
    ]
    words = zip(decisions.kind, decisions.unit, strict=True)
    return [
        (
            step,
            *ids[:, i].tolist(),
            DECISION_KINDS[kind],
            DECISION_UNITS[unit],
            *(tuple(part[i].tolist()) for part in lists),
        )
        for i, (kind, unit) in enumerate(words)
    ]


@pytest.mark.parametrize("block", [1, 3, 32])
def test_decisions_come_back_in_whatever_blocks_they_were_written(tmp_path: Path, block: int) -> None:
    rng = np.random.default_rng(block)
    records = [
        replace(make_step(rng, step, SIZES), decisions=make_decisions(rng, 3, 2) if step % 3 else None)
        for step in range(STEPS)
    ]
    with write(tmp_path, records, SIZES, block_steps=block) as reader:
        frame, counts, of_step = reader.decisions(), reader.decision_counts(), reader.decisions(step=1)
    wanted = [row for r in records if r.decisions is not None for row in rows_of(r.step, r.decisions)]
    numbers = frame[["step", "layer", "kv_head", "candidates", "asked", "granted"]].fillna(-1).astype(int)
    lists = ([tuple(int(span) for span in spans) for spans in frame[name]] for name in ("refused_span", "missed_span"))
    read = list(zip(*numbers.to_numpy().T.tolist(), frame["kind"], frame["unit"], *lists, strict=True))
    assert sorted(read) == sorted(wanted)
    assert counts["decisions"].sum() == len(wanted)
    assert set(of_step["step"]) == {1}


def test_the_summary_level_keeps_no_decisions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [replace(make_step(rng, 0, SIZES), decisions=make_decisions(rng, 3, 2))]
    with write(tmp_path, records, SIZES, trace_level="summary") as reader:
        assert reader.decisions().empty
        assert not reader.records_decisions()


@pytest.mark.parametrize(
    "change",
    [
        {"requested": np.array([2], np.int32)},
        {"kind": np.array([len(DECISION_KINDS)], np.uint8)},
        {"refused": np.array([-1], np.int32), "requested": np.array([0], np.int32)},
        {"missed_span": np.array([3], np.int32)},
        {"layer": np.array([1, 2], np.int32)},
    ],
)
def test_counts_that_do_not_add_up_are_refused(change: dict[str, np.ndarray]) -> None:
    decisions = Decisions.filled(1, "recall", "spans", {"requested": 1, "granted": 1})
    with pytest.raises(TraceError):
        copied_decisions(0, replace(decisions, **change))
