"""A span that a counterfactual holds is resident from then on, whatever happens to the method's own copy."""

from __future__ import annotations

from kvlens.store.states import changes, replay


def test_a_held_span_stays_resident() -> None:
    events = [(1, "evict", None), (1, "hold", None), (1, "release", None), (1, "offload", None), (2, "release", None)]
    assert replay([(1, "partial", None), (2, "resident", None)], events) == {1: "resident", 2: "cold"}


def test_the_change_is_told_at_the_step_of_the_hold() -> None:
    spans = [(1, "cold", "raw", -1)]
    events = [(0, 1, "recall", None), (1, 1, "release", None), (3, 1, "hold", None), (4, 1, "release", None)]
    assert changes(spans, events) == [(-1, 1, "cold"), (0, 1, "resident"), (1, 1, "cold"), (3, 1, "resident")]
