"""A run's decisions, kept in memory while it follows full KV's tokens: where each span lay for each KV head while every
step attended, and which spans its queries chose. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvlens.instruments import CutRow
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import SPAN_STATES, EventRow, SpanHeadRow, SpanRow
from kvlens.shape import KVShape
from kvlens.store.states import changes

DEPARTURES = ("evict", "thin")
"""kinds of events by which tokens are gone for good"""
STATES = (*SPAN_STATES, "unborn")
STATE = {name: index for index, name in enumerate(STATES)}


@dataclass
class Story:
    """A sink that keeps what the causes are told by. Arrays are [L, H_kv, S], S one more than the highest span id."""

    shape: KVShape
    spans: list[SpanRow] = field(default_factory=list)
    forms: list[SpanHeadRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    cuts: list[CutRow] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def prefill(self, record: PrefillRecord) -> None:
        self.spans += record.spans
        self.forms += record.span_heads
        self.events += record.events
        self.cuts += record.cuts

    def step(self, record: StepRecord) -> None:
        self.spans += record.spans
        self.forms += record.span_heads
        self.events += record.events
        self.cuts += record.cuts
        self.steps.append(record)

    @property
    def count(self) -> int:
        """One more than the highest span id."""
        return 1 + max((row.span for row in self.spans), default=-1)

    @property
    def size(self) -> tuple[int, int, int]:
        """(layers, KV heads, count): the shape of the arrays."""
        return self.shape.layers, self.shape.kv_heads, self.count

    def states(self) -> np.ndarray:
        """uint8 [T, L, H_kv, S]: index into STATES of each span while each step attended."""
        states = np.full((len(self.steps), *self.size), STATE["unborn"], np.uint8)
        forms = {(row.layer, row.kv_head, row.span): row.form for row in self.forms}
        for (layer, head), moves in self._moves().items():
            births = [(row.span, row.state, forms.get((layer, head, row.span)), row.born_step) for row in self.spans]
            for step, span, state in changes(births, moves):
                states[max(step, 0) :, layer, head, span] = STATE[state]
        return states

    def _moves(self) -> dict[tuple[int, int], list[tuple[int, int, str, int | None]]]:
        """(layer, KV head) -> (first step that attends under it, span, kind, query head) of its events, in order."""
        moves: dict[tuple[int, int], list[tuple[int, int, str, int | None]]]
        moves = {(layer, head): [] for layer in range(self.shape.layers) for head in range(self.shape.kv_heads)}
        for event in self.events:
            if event.span is None or (event.kind == "hold" and event.value is not None):
                continue
            for place in self.places(event):
                moves[place].append((event.step + bool(event.after_attention), event.span, event.kind, event.q_head))
        return moves

    def places(self, row: EventRow | CutRow) -> list[tuple[int, int]]:
        """Return the (layer, KV head) that an event or a cut speaks for."""
        head = row.kv_head
        if head is None and isinstance(row, EventRow) and row.q_head is not None:
            head = row.q_head // self.shape.group
        layers = range(self.shape.layers) if row.layer is None else (row.layer,)
        heads = range(self.shape.kv_heads) if head is None else (head,)
        return [(layer, kv_head) for layer in layers for kv_head in heads]

    def find_early(self, question_steps: int) -> np.ndarray:
        """Return bool [L, H_kv, S]: spans most of whose dropped tokens were gone before the question was fed to its
        end. Where no cut was recorded, the span's last event decides."""
        early, late, last = np.zeros(self.size), np.zeros(self.size), np.full(self.size, -1)
        for cut in self.cuts:
            dropped = early if cut.step < question_steps else late
            for layer, head in self.places(cut):
                dropped[layer, head, cut.span] += cut.dropped
        for event in self.events:
            if event.kind in DEPARTURES and event.span is not None:
                for layer, head in self.places(event):
                    last[layer, head, event.span] = max(last[layer, head, event.span], event.step)
        is_early: np.ndarray = np.where(early + late > 0, early >= late, last < question_steps) & (question_steps > 0)
        return is_early
