"""Decisions made of selections by hand: what was asked, granted, refused and missed, and by which figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlens.decisions import DECISION_KINDS, NONE, Decided, Decisions, decisions_between
from kvlens.instruments import CutRow
from kvlens.memory.placement import Gate, Selection
from kvlens.recording.decisions import decisions_at, zoom_columns
from kvlens.recording.snapshot import DecidedStep

SPANS = 5
"""ids of one KV head with two query heads; span 0 is the window"""


def mask(*rows: list[int]) -> torch.Tensor:
    """bool [rows, SPANS]."""
    table = torch.zeros(len(rows), SPANS, dtype=torch.bool)
    for row, spans in enumerate(rows):
        table[row, spans] = True
    return table


def decided(selections: list[Selection | None], hot: list[int], refused: list[tuple[int, int, int]]) -> Decisions:
    """The decisions of layers in which the spans `hot` were on the device; refused: (layer, KV head, span)."""
    units = [np.array(refused).T] if refused else []
    step = DecidedStep(selections, mask(hot)[None].expand(len(selections), 1, SPANS), units)
    decisions = decisions_at(step)
    assert decisions is not None
    return decisions


def counts(decisions: Decisions) -> list[tuple[int, ...]]:
    columns = (decisions.requested, decisions.granted, decisions.refused, decisions.missed)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def kinds(decisions: Decisions) -> list[str]:
    return [DECISION_KINDS[kind] for kind in decisions.kind]


def test_a_zoom_belongs_to_a_query_head_and_what_has_no_room_is_refused() -> None:
    fine = mask([1, 2, 3], [4])[None]
    gate = Gate(torch.tensor([0.5, 2.0]), torch.tensor([0.1, 1.5]))
    wishes = torch.tensor([[1, 2, 3, 4]])
    zoom = Selection(fine, wishes, cause="zoom", zoomable=mask([1, 2, 3, 4])[0], gate=gate)
    decisions = decided([None, zoom], hot=[1], refused=[(1, 0, 2), (1, 0, 3)])
    assert kinds(decisions) == ["zoom", "zoom"]
    assert (decisions.layer.tolist(), decisions.q_head.tolist()) == ([1, 1], [0, 1])
    assert counts(decisions) == [(3, 1, 2, 0), (1, 0, 0, 1)]
    assert (decisions.refused_span.tolist(), decisions.missed_span.tolist()) == ([2, 3], [4])
    assert decisions.candidates.tolist() == [4, 4]
    np.testing.assert_allclose([decisions.score, decisions.cut], [[0.5, 2.0], [0.1, 1.5]], rtol=1e-6)
    columns = zoom_columns(decisions, layers=2, q_heads=2)
    np.testing.assert_array_equal(columns["zoom_asked"], [[np.nan, np.nan], [3, 1]])
    np.testing.assert_array_equal(columns["zoom_refused"], [[np.nan, np.nan], [2, 0]])


@pytest.mark.parametrize(("now", "kind"), [(True, "correction"), (False, "recall")])
def test_a_recall_that_reads_an_earlier_selection_misses_what_it_asks_for(now: bool, kind: str) -> None:
    read = [2, 3] if not now else [1, 2]
    selection = Selection(
        mask(read)[:, None],
        torch.tensor([[1, 2, -1]]),
        now=torch.tensor([now]),
        cause="correction",
        gate=Gate(torch.tensor([0.7]), 0.8),
        score=torch.tensor([[torch.nan, 4.0, 3.0, 2.0, torch.nan]]),
    )
    decisions = decided([selection], hot=[1, 2, 3] if now else [2, 3], refused=[])
    assert kinds(decisions) == [kind]
    assert counts(decisions) == [(2, 2, 0, 0) if now else (2, 1, 0, 1)]
    assert decisions.missed_span.tolist() == ([] if now else [1])
    assert decisions.candidates.tolist() == [3]
    assert decisions.q_head.tolist() == [NONE]
    np.testing.assert_allclose([decisions.score[0], decisions.cut[0]], [0.7, 0.8], rtol=1e-6)


def test_a_ranking_names_the_best_that_was_left_out_and_the_worst_that_was_taken() -> None:
    selection = Selection(
        mask([1, 3], [3, 4])[None], torch.full((1, 0), -1), score=torch.tensor([[torch.nan, 9.0, 5.0, 7.0, 6.0]])
    )
    decisions = decided([selection, None, selection], hot=[], refused=[])
    assert kinds(decisions) == ["selection", "selection"]
    assert decisions.layer.tolist() == [0, 2]
    assert counts(decisions) == [(3, 3, 0, 0)] * 2
    assert (decisions.score.tolist(), decisions.cut.tolist()) == ([5.0, 5.0], [6.0, 6.0])


def test_single_tokens_are_counted_as_tokens() -> None:
    rows = Selection(mask([1])[:, None], torch.full((1, 0), -1), rows=torch.tensor([[4, 7, -1]]))
    decisions = decided([rows], hot=[1], refused=[])
    assert (kinds(decisions), decisions.unit.tolist(), counts(decisions)) == (["recall"], [1], [(2, 2, 0, 0)])


def test_evictions_come_from_cuts_and_a_method_adds_its_own() -> None:
    def column(*values: float) -> np.ndarray:
        return np.array(values, np.float32)

    cut = CutRow(3, 1, None, 10, 8, 0.4, *(column(1.0, 2.0).astype(np.int32),) * 4, column(0.1, np.nan))
    unranked = CutRow(3, None, None, 5, 4, float("nan"), *(column(1.0).astype(np.int32),) * 4, column(np.nan))
    decisions = decisions_between([cut, unranked], [Decided("reconstruction", 40, 6, 3.5, 3.0)])
    assert decisions is not None
    assert kinds(decisions) == ["eviction", "eviction", "reconstruction"]
    assert decisions.layer.tolist() == [1, NONE, NONE]
    assert counts(decisions) == [(2, 2, 0, 0), (1, 1, 0, 0), (6, 6, 0, 0)]
    np.testing.assert_allclose(decisions.score, [0.1, np.nan, 3.5], rtol=1e-6)
    np.testing.assert_allclose(decisions.cut, [0.4, np.nan, 3.0], rtol=1e-6)
    assert decisions_between([], []) is None
