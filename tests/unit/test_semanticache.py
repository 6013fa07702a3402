"""SemantiCache against clusters made one token after the other, and attention over the merged entries, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Trial

from kvlens.methods.semanticache import HALVINGS

N, NEW, ENTRIES, SINKS, WINDOW = 75, 4, 20, 3, 9
SIZES = {"entries": ENTRIES, "sinks": SINKS, "window": WINDOW, "longest": 11}
TEXT = tuple("end." if at % 13 == 12 else f"word{at}" for at in range(N + 1))
CHUNKS = [(3, 13), (13, 24), (24, 26), (26, 37), (37, 39), (39, 50), (50, 52), (52, 63), (63, 65), (65, 66)]
"""after a full stop, after 11 tokens, where the window begins"""
MARKS = [12, 25, 38, 51, 64]
TEXTS = [(3, 12), (13, 24), (24, 25), (26, 37), (37, 38), (39, 50), (50, 51), (52, 63), (63, 64), (65, 66)]


def clusters(keys: np.ndarray, threshold: float, chunks: list[tuple[int, int]]) -> list[list[int]]:
    """keys [n, D] -> positions of each cluster, chunk by chunk, by their seeds."""
    unit, made = keys / np.linalg.norm(keys, axis=-1, keepdims=True), []
    for start, end in chunks:
        left = list(range(start, end))
        while left:
            mine = [p for p in left if p == left[0] or unit[p] @ unit[left[0]] >= threshold]
            left = [p for p in left if p not in mine]
            made.append(mine)
    return made


@pytest.fixture
def trial() -> Trial:
    return Trial("semanticache", N, NEW, text=TEXT, **SIZES)


@pytest.mark.parametrize("whole_marks", [False, True])
def test_every_step_attends_the_merged_entries(whole_marks: bool) -> None:
    chunks = sorted([*TEXTS, *((at, at + 1) for at in MARKS)]) if whole_marks else CHUNKS
    trial = Trial("semanticache", N, NEW, text=TEXT, whole_marks=whole_marks, **SIZES)
    found = {span.tok_start: span.tok_end for span in trial.session.memory.spans.rows if span.kind == "chunk"}
    assert list(found.items()) == chunks
    notes = {(note.name, note.layer): note.values for note in trial.session.method.drain_journal()}
    q, k = trial.step(0)
    for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
        at = layer, head // SHAPE.group
        threshold = float(notes["threshold", layer][at[1]])
        made = clusters(trial.keys[at], threshold, chunks)
        assert len(made) <= ENTRIES < len(clusters(trial.keys[at], threshold + 2 / 2**HALVINGS, chunks))
        keys, values = (
            np.array([*of[at][:SINKS], *(of[at][c].mean(0) for c in made), *of[at][N - WINDOW :], k[at]])
            for of in (trial.keys, trial.values)
        )
        more = np.log([*[1] * SINKS, *map(len, made), *[1] * (WINDOW + 1)])
        scores = keys @ q[layer, head] / np.sqrt(SHAPE.head_dim) + more
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(trial.outs[layer][0, head, 0], weights @ values / weights.sum(), atol=1e-5)
        merged = [c for c in made if len(c) > 1]
        ratio = [
            np.linalg.norm(trial.keys[at][c].mean(0)) / np.linalg.norm(trial.keys[at][c], axis=-1).mean()
            for c in merged
        ]
        assert float(notes["shortened", layer][at[1]]) == pytest.approx(np.mean(ratio), abs=1e-4)


@pytest.mark.parametrize("whole_marks", [False, True])
def test_more_chunks_than_entries_are_joined(whole_marks: bool) -> None:
    """Marks are whole where they fit alone."""
    trial = Trial("semanticache", N, NEW, text=TEXT, whole_marks=whole_marks, **SIZES | {"entries": 4})
    chunks = [(s.tok_start, s.tok_end) for s in trial.session.memory.spans.rows if s.kind == "chunk"]
    assert chunks == [(3, 13), (13, 37), (37, 52), (52, 66)]


def test_bytes_are_those_of_the_entries(trial: Trial) -> None:
    memory, slots = trial.session.memory, SINKS + ENTRIES + WINDOW + NEW
    held = sum(t.untyped_storage().nbytes() for t in memory.hot.tensors())
    assert held == SHAPE.layers * SHAPE.kv_heads * (slots * (SHAPE.head_token_bytes + 9) + ENTRIES * 4)
