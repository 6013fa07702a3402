"""The cause of every (layer, KV head, span) that a run did not read as full attention does.

A step's cause follows from where the span lay while the step attended and from what the step's query chose. A span has
different causes at different steps; the cause with most unread mass over the steps counts. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlens.holds import Hold, Triple, without
from kvlens.instruments import Oracle, Scores
from kvlens.ledger.causes import CODES, INDEX, NONE
from kvlens.ledger.story import STATE, Story
from kvlens.records import StepRecord

FAINT = 1e-9
"""weight of a step at which a span was not exact and no unread mass was listed"""
LEAST = 0.01
"""share of all unread mass below which a cause is left to the rest"""


@dataclass(frozen=True)
class Causes:
    """The spans of a run by cause."""

    cause_of: np.ndarray
    """int8 [L, H_kv, S]: index into CODES; NONE: the span was read as full attention reads it"""
    missed: np.ndarray
    """float64 [L, H_kv, S]: unread mass, added over steps and query heads"""
    story: Story

    @property
    def active(self) -> tuple[str, ...]:
        """The causes that left a share of at least LEAST of all unread mass, in the order of CODES."""
        total = self.missed.sum()
        return tuple(code for code in CODES if total > 0 and self.mass(code) >= LEAST * total)

    def mass(self, cause: str) -> float:
        """Return the unread mass of a cause."""
        return float(self.missed[self.cause_of == INDEX[cause]].sum())

    def triples(self, cause: str) -> list[Triple]:
        """Return the (layer, KV head, span) of a cause, most unread mass first."""
        places = np.argwhere(self.cause_of == INDEX[cause])
        order = np.argsort(-self.missed[tuple(places.T)], kind="stable")
        return [(int(layer), int(head), int(span)) for layer, head, span in places[order]]

    def holds(self, causes: frozenset[str]) -> tuple[Hold, ...]:
        """Return what repairs the causes: their spans, held exactly from step 0 on. A span's tokens are its range at
        birth, the window's those that no other span ever had."""
        is_repaired = np.isin(self.cause_of, [INDEX[cause] for cause in causes])
        holds: list[Hold] = []
        for row in self.story.spans:
            heads = tuple((int(layer), int(head)) for layer, head in np.argwhere(is_repaired[:, :, row.span]))
            if heads and row.kind != "window":
                holds.append(Hold(row.span, row.tok_start, row.tok_end, heads))
            elif heads:
                gaps = self._window()
                holds += [Hold(row.span, start, end, heads, whole=False) for start, end in gaps]
        return tuple(holds)

    def _window(self) -> list[tuple[int, int]]:
        """Positions [start, end) that the window alone ever had."""
        span_ranges = [(row.tok_start, row.tok_end) for row in self.story.spans if row.kind != "window"]
        end = max(row.tok_end for row in self.story.spans if row.kind == "window")
        return list(without((0, end + len(self.story.steps)), span_ranges))


def classify(story: Story, question_steps: int, always_waits: bool = False) -> Causes:
    """Return the cause of every span. question_steps: steps that feed a question behind the placed context;
    always_waits: every selection of the method is read from the next step on."""
    states = story.states()
    weights = np.zeros((len(CODES), *story.size))
    missed = np.zeros(story.size)
    chosen_before = np.zeros(story.size, bool)
    ranked_before = np.zeros(story.size[:2], bool)
    refused_before = np.zeros(story.size, bool)
    early = story.find_early(question_steps)
    for record, state in zip(story.steps, states, strict=True):
        unread, lacking = _unread(record.oracle, story)
        waits = _waits(record, story, always_waits)[:, :, None]
        chosen_spans, ranked = _chosen_spans(record.scores, story)
        refused_spans = _refused(record, story)
        has_no_room = np.where(waits, refused_before, refused_spans)
        late_spans = decided(record, story, "missed")
        old_choice = late_spans | waits & chosen_spans & ~chosen_before | (ranked_before & ~ranked)[:, :, None]
        query_cause = np.where(has_no_room, INDEX["refused"], np.where(old_choice, INDEX["stale"], INDEX["not_asked"]))
        routed = (ranked | ranked_before)[:, :, None]
        cause = np.full(story.size, NONE, np.int8)
        is_gone = (state == STATE["evicted"]) | (state == STATE["partial"])
        packed = np.isin(state, [STATE[name] for name in ("quantised", "reconstructed", "rewritten")])
        hot = (state == STATE["resident"]) | packed
        partly = hot & (unread > lacking / 2) & (unread > 0)
        cause[packed] = INDEX["precision"]
        cause[state == STATE["coarse"]] = INDEX["precision"]
        on_host = (state == STATE["cold"]) | (state == STATE["partly_recalled"])
        chosen_by_query = on_host | (state == STATE["coarse"]) & routed | partly
        cause[chosen_by_query] = query_cause[chosen_by_query]
        cause[is_gone] = np.where(early, INDEX["evicted_before"], INDEX["evicted_after"])[is_gone]
        for index in range(len(CODES)):
            here = cause == index
            weights[index][here] += lacking[here] + FAINT
        missed[cause != NONE] += lacking[cause != NONE]
        chosen_before, refused_before = np.where(ranked[:, :, None], chosen_spans, chosen_before), refused_spans
        ranked_before |= ranked
    result = np.where(weights.max(0) > 0, weights.argmax(0), NONE).astype(np.int8)
    return Causes(_complete(result, story), missed, story)


def _complete(causes: np.ndarray, story: Story) -> np.ndarray:
    """Give the spans without a cause to routing where the KV head's queries left any span out: its selection is not
    fresh while it can leave out these."""
    routed = (causes == INDEX["not_asked"]).any(2)[:, :, None]
    spans = np.zeros(story.count, bool)
    spans[[row.span for row in story.spans if row.kind != "window"]] = True
    return np.where(routed & spans & (causes == NONE), INDEX["not_asked"], causes).astype(np.int8)


def _unread(oracle: Oracle | None, story: Story) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays [L, H_kv, S] of attention mass: on tokens attended in no form, and all that the run lacks.
    Each is full KV's own mass where it was recorded, added over the query heads of a group."""
    unread, lacking = np.zeros(story.size), np.zeros(story.size)
    if oracle is None:
        return unread, lacking
    layer, head, place = np.nonzero((oracle.span >= 0) & (oracle.span < story.count))
    where = layer, head // story.shape.group, oracle.span[layer, head, place]
    mass = oracle.wanted_mass[layer, head, place].astype(np.float64)
    np.add.at(lacking, where, mass * oracle.unread_share[layer, head, place])
    if oracle.wanted_unread is not None:
        np.add.at(unread, where, oracle.wanted_unread[layer, head, place].astype(np.float64))
    return unread, lacking


def _chosen_spans(scores: Scores | None, story: Story) -> tuple[np.ndarray, np.ndarray]:
    """Return bool [L, H_kv, S]: spans that the step's query chose; and bool [L, H_kv]: the step ranked spans."""
    chosen_spans = np.zeros(story.size, bool)
    if scores is None:
        return chosen_spans, np.zeros(story.size[:2], bool)
    layer, head, place = np.nonzero(scores.chosen & (scores.span >= 0) & (scores.span < story.count))
    chosen_spans[layer, head, scores.span[layer, head, place]] = True
    return chosen_spans, scores.candidates > 0


def _refused(record: StepRecord, story: Story) -> np.ndarray:
    """Return bool [L, H_kv, S]: spans that were chosen and had no room."""
    refused_spans = decided(record, story, "refused")
    for event in record.events:
        if event.kind == "refused" and event.span is not None:
            for layer, head in story.places(event):
                refused_spans[layer, head, event.span] = True
    return refused_spans


def decided(record: StepRecord, story: Story, outcome: str) -> np.ndarray:
    """Return bool [L, H_kv, S]: spans that the step's recorded decisions asked for and did not read; none where
    decisions were not recorded. outcome: `refused` (no room) or `missed` (they came after the attention)."""
    spans = np.zeros(story.size, bool)
    decisions = record.decisions
    if decisions is None:
        return spans
    decision = np.repeat(np.arange(len(decisions.layer)), getattr(decisions, outcome))
    for place, span in zip(decision.tolist(), getattr(decisions, f"{outcome}_span").tolist(), strict=True):
        layer, head = int(decisions.layer[place]), int(decisions.kv_head[place])
        spans[slice(None) if layer < 0 else layer, slice(None) if head < 0 else head, span] = True
    return spans


def _waits(record: StepRecord, story: Story, always: bool) -> np.ndarray:
    """Return bool [L, H_kv]: KV heads that read what the step before had chosen."""
    if always:
        return np.ones(story.size[:2], bool)
    corrected, similarity = record.head.get("corrected"), record.kv.get("similarity")
    if corrected is None or similarity is None:
        return np.zeros(story.size[:2], bool)
    uncorrected: np.ndarray = (corrected[:, :: story.shape.group] == 0) & ~np.isnan(similarity)
    return uncorrected
