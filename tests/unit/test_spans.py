"""Segmenters: worked examples and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import raises_code

from kvlens.spans import Span, Surprisal, check_partition, entropy_feasible, entropy_paper, fixed_chunks

nats = st.lists(st.floats(0, 50, allow_nan=False, width=32), min_size=0, max_size=300)


def shape(spans: list[Span]) -> list[tuple[int, int, str]]:
    return [(s.tok_start, s.tok_end, s.kind) for s in spans]


def test_paper_rule_by_hand() -> None:
    # 6, 7 and 11 stand out, 0 and 1 are sinks; 12..13 has fewer than 3 tokens.
    h = [0, 1, 1, 1, 1, 1, 9, 8, 1, 1, 1, 9, 1, 1]
    assert shape(entropy_paper(h, alpha=1.0, l_min=3, sinks=2)) == [
        (0, 2, "sink"),
        (2, 6, "entropy"),
        (6, 8, "anchor"),
        (8, 11, "entropy"),
        (11, 12, "anchor"),
        (12, 14, "short"),
    ]


def test_feasible_rule_by_hand() -> None:
    # threshold: mu = 37/15, above it 4 (9), 5 (8), 10 (7). 4 is taken first; 5 is too near; 10 leaves 5..9 (5 >= 3)
    # and 11..15 (5).
    h = [0, 1, 1, 1, 9, 8, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1]
    assert shape(entropy_feasible(h, alpha=1.0, l_min=3, l_max=6, sinks=1)) == [
        (0, 1, "sink"),
        (1, 4, "entropy"),
        (4, 5, "anchor"),
        (5, 10, "entropy"),
        (10, 11, "anchor"),
        (11, 16, "entropy"),
    ]
    # Capped at one anchor: the run 5..15 has 11 tokens > 6 and is split at its highest surprisal at least 3 from both
    # ends: token 10.
    assert shape(entropy_feasible(h, alpha=1.0, l_min=3, l_max=6, anchor_cap=1, sinks=1)) == [
        (0, 1, "sink"),
        (1, 4, "entropy"),
        (4, 5, "anchor"),
        (5, 10, "entropy"),
        (10, 16, "entropy"),
    ]
    # With 2 sinks the run before anchor 4 has 2 tokens < 3: the anchor is demoted and 2..9 is one run, too long,
    # split at its highest surprisal that leaves 3 on both sides: token 5.
    assert shape(entropy_feasible(h, alpha=1.0, l_min=3, l_max=6, sinks=2)) == [
        (0, 2, "sink"),
        (2, 5, "entropy"),
        (5, 10, "entropy"),
        (10, 11, "anchor"),
        (11, 16, "entropy"),
    ]


def test_reasons_carry_the_numbers() -> None:
    h = [0, 1, 1, 1, 9, 8, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1]
    stats = Surprisal.measure(h)
    anchor = next(s for s in entropy_feasible(h, l_min=3, l_max=6, sinks=1) if s.kind == "anchor")
    assert "9.00 nats" in anchor.reason
    assert f"{stats.threshold(1.0):.2f}" in anchor.reason
    assert anchor.mean_surprisal == 9.0


@given(nats, st.integers(0, 40), st.floats(0, 3), st.integers(1, 20), st.integers(0, 6))
def test_paper_partition(h: list[float], start: int, alpha: float, l_min: int, sinks: int) -> None:
    spans = entropy_paper(h, alpha, l_min, start=start, sinks=sinks)
    check_partition(spans, start, start + len(h))
    threshold = Surprisal.measure(h, start).threshold(alpha)
    for span in spans:
        inside = [t > threshold for t in h[span.tok_start - start : span.tok_end - start]]
        if span.tok_start == 0:
            inside = inside[1:]
        assert span.kind == "sink" or all(inside) if span.kind == "anchor" else span.kind == "sink" or not any(inside)
        assert span.kind != "entropy" or len(span) >= l_min
        assert span.kind != "short" or len(span) < l_min
    assert spans == entropy_paper(np.array(h), alpha, l_min, start=start, sinks=sinks)


@given(
    nats,
    st.integers(0, 40),
    st.floats(0, 3),
    st.integers(1, 20),
    st.integers(0, 40),
    st.integers(0, 6),
    st.integers(0, 5),
)
def test_feasible_partition(
    h: list[float], start: int, alpha: float, l_min: int, more: int, sinks: int, cap: int
) -> None:
    l_max = 2 * l_min + more
    spans = entropy_feasible(h, alpha, l_min, l_max, cap, start=start, sinks=sinks)
    check_partition(spans, start, start + len(h))
    assert sum(len(s) for s in spans if s.kind == "anchor") <= cap
    assert all(l_min <= len(s) <= l_max for s in spans if s.kind == "entropy")
    free = max(0, start + len(h) - max(start, sinks))
    assert [len(s) for s in spans if s.kind == "short"] == ([free] if 0 < free < l_min else [])
    assert sum(len(s) for s in spans if s.kind == "sink") == max(0, min(len(h), sinks - start))
    assert spans == entropy_feasible(h, alpha, l_min, l_max, cap, start=start, sinks=sinks)


def test_frozen_statistics_cut_a_decoded_block() -> None:
    frozen = Surprisal(mu=1.0, sigma=1.0)
    block = [5.0] * 8
    assert shape(entropy_paper(block, start=100, stats=frozen)) == [(100, 108, "anchor")]
    assert shape(entropy_paper(block, start=100, l_min=4)) == [(100, 108, "entropy")], (
        "by its own statistics nothing stands out"
    )


@pytest.mark.parametrize("segment", [entropy_paper, entropy_feasible])
def test_extreme_inputs(segment) -> None:  # type: ignore[no-untyped-def]
    assert segment([]) == []
    one = segment([math.nan])
    assert shape(one) == [(0, 1, "sink")]
    assert one[0].mean_surprisal is None
    check_partition(segment([3.0] * 500), 0, 500)
    assert not [s for s in segment([3.0] * 500) if s.kind == "anchor"], "nothing exceeds a mean that all tokens equal"
    with raises_code("not_finite", token=2):
        segment([1.0, 1.0, math.nan, 1.0])
    with pytest.raises(ValueError, match="token 7"):
        segment([math.inf], start=7)


def test_feasible_needs_room_to_split() -> None:
    with pytest.raises(ValueError, match="l_max"):
        entropy_feasible([1.0] * 9, l_min=4, l_max=7)


def test_fixed_sizes() -> None:
    assert shape(fixed_chunks(0, 5, 2, kind="page")) == [(0, 2, "page"), (2, 4, "page"), (4, 5, "page")]
    assert shape(fixed_chunks(3, 8, 3)) == [(3, 6, "chunk"), (6, 8, "chunk")]
    with pytest.raises(ValueError, match="at least one"):
        fixed_chunks(0, 4, 0)
    with pytest.raises(ValueError, match="continue"):
        check_partition([Span(0, 2, "page", ""), Span(3, 4, "page", "")], 0, 4)
