"""A made-up run whose effects are not stored yet, and effects that make its verdict name another span."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlens.instruments import Effects
from kvlens.lens.verdict import verdict
from kvlens.store import amend
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic

STEP = 9
Place = tuple[int, int, int]
"""layer, KV head, span"""


class WithoutEffects(TraceWriter):
    def effects(self, effects: Sequence[Effects]) -> None:
        """Leave the effects out, as a run does that stores them later."""


def write_awaited(folder: Path) -> str:
    """Write a run that lost at STEP and whose effects are being computed. Return its uid."""
    return write_synthetic(
        folder,
        2,
        4,
        2,
        12,
        14,
        seed=3,
        prompt_tokens=200,
        answer="4172",
        no_effects=amend.PENDING,
        writer_class=WithoutEffects,
    )


def named_place(folder: Path, uid: str) -> Place:
    """Return the layer, KV head and span that the run's verdict names."""
    with TraceReader.open(folder, uid) as reader:
        found = verdict(reader)
    assert found is not None
    assert found.missed is not None
    return found.missed.layer, found.missed.kv_head, found.missed.span


def store_effects(folder: Path, uid: str) -> Place:
    """Store effects as a run does after it has ended, the largest on another span than the one with most regret.
    Return the place of the largest."""
    old = named_place(folder, uid)
    with TraceReader.open(folder, uid) as reader:
        triples = reader.triples(STEP)
    triples = triples[(triples["regret"] > 0) & (triples["span"] != old[2]) & (triples["layer"] != old[0])]
    layer, kv_head, span = triples.iloc[0][["layer", "kv_head", "span"]].astype(int)
    layers, kv_heads, spans = (np.array([value], np.int32) for value in (layer, kv_head, span))
    effects = Effects(STEP, 1.5, layers, kv_heads, spans, np.array([0.8], np.float32))
    amend.amend(folder / uid, effects, (2, 2), None, 0.5)
    return int(layer), int(kv_head), int(span)
