"""A step on its way to its record: what the engine says of it, what was frozen of it, how its copies ended, what was
measured. Each stage is made once and changed by nobody; the record is built from the last two.
The mean keys of the prompt's spans, for looking at how spans lie to each other, are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvlens import instruments
from kvlens.decisions import Decided, Decisions, decisions_between
from kvlens.instruments import CutRow, Loss, SpanKeys, span_key_bytes
from kvlens.memory.memory import Memory
from kvlens.memory.windowed import WindowedLayers
from kvlens.methods.base import Method
from kvlens.recording.selfcheck import Tally
from kvlens.recording.snapshot import Measured, Snapshot
from kvlens.records import StepRecord
from kvlens.rows import EventRow, JournalRow, SpanHeadRow, SpanRow, TransferRow


@dataclass(frozen=True)
class StepFacts:
    """What the engine knows of a step besides the attention. Times in us since the run began."""

    step: int
    t_us: int
    dur_us: int
    token_id: int
    text: str
    logprob: float
    next_entropy: float
    loss: Loss | None = None
    """against the full-KV reference; None: not compared"""
    phases: dict[str, int] | None = None
    """microseconds in each phase (kvlens.instruments), together dur_us; None: not timed"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step as the engine's thread left it. Bytes; spans, events, journal and cuts are those that arose in it."""

    facts: StepFacts
    shot: Snapshot
    record_us: int
    resident_bytes: int
    peak_bytes: int
    cold_bytes: int
    kv: dict[str, np.ndarray]
    """the columns [L, H_kv] that need no measuring"""
    events: list[EventRow]
    spans: list[SpanRow]
    span_heads: list[SpanHeadRow]
    journal: list[JournalRow]
    cuts: list[CutRow]
    decided: list[Decided]
    """by the method between steps"""


@dataclass(frozen=True)
class Settled:
    """A step whose copies, those in the background too, have ended."""

    seen: Seen
    transfers: list[TransferRow]
    wait_us: int

    def record(self, measured: Measured) -> StepRecord:
        """The whole step."""
        visited, facts = self.seen, self.seen.facts
        between = decisions_between(visited.cuts, visited.decided)
        return StepRecord(
            step=facts.step,
            t_us=facts.t_us,
            dur_us=facts.dur_us,
            wait_us=self.wait_us,
            record_us=visited.record_us,
            token_id=facts.token_id,
            text=facts.text,
            logprob=facts.logprob,
            next_entropy=facts.next_entropy,
            resident_bytes=visited.resident_bytes,
            peak_bytes=visited.peak_bytes,
            cold_bytes=visited.cold_bytes,
            head=measured.head,
            kv=visited.kv | measured.kv,
            top_span=measured.top_span,
            top_mass=measured.top_mass,
            tail_mass=measured.tail_mass,
            transfers=self.transfers,
            events=visited.events,
            spans=visited.spans,
            span_heads=visited.span_heads,
            journal=visited.journal,
            cuts=visited.cuts,
            scores=measured.scores,
            loss=facts.loss,
            phases=facts.phases,
            oracle=measured.oracle,
            decisions=Decisions.joined([part for part in (between, measured.decisions) if part is not None]),
        )


class Follower(Protocol):
    """Watches a run that is recorded; must change nothing."""

    def note_step(self, seen: Seen) -> None:
        """A step has ended: once each, in order, on the engine's thread."""

    def decoded(self, text: str) -> None:
        """The last step was made and this is the output. The last steps are still being measured."""

    def sketched(self, step: int, attended: np.ndarray, coverage: np.ndarray | None) -> None:
        """Attended tokens [L, H_kv] and coverage [L, Hq] (None: not recorded) of some steps, on the second thread,
        before they are measured."""


class FullKVAttention(Protocol):
    """Full KV of the run's prompt, fed the run's own tokens."""

    def attention(self, tokens: Sequence[int], layers: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Return full KV's own attention at the next steps, float32 [l, H_kv, G, n] of each step's `layers`; None of a
        step without layers, or where it cannot be had. tokens: what the run chose, or was fed, at these steps."""


def kv_columns(memory: Memory, windowed: WindowedLayers, tally: Tally) -> dict[str, np.ndarray]:
    """Return the columns [L, H_kv] of the step that ends; the tally counts the copies that it began."""
    size, opened = (memory.shape.layers, memory.shape.kv_heads), memory.transfers.opened
    moved = {name: np.zeros(size) for name in ("h2d", "d2h", "blocking")}
    for entry in opened:
        place = (entry.layers, entry.kv_heads)
        np.add.at(moved[entry.direction], place, entry.sizes)
        if entry.direction == "h2d" and entry.blocking:
            np.add.at(moved["blocking"], place, entry.sizes)
    tally.count_entries(opened)
    columns = {
        "h2d_bytes": moved["h2d"],
        "d2h_bytes": moved["d2h"],
        "blocking_bytes": moved["blocking"],
        **memory.recall_counts(),
    }
    none = {"ideal_bytes": np.nan}
    whole = {name: windowed.spread(column, none.get(name, 0.0)) for name, column in columns.items()}
    return whole | {"resident_bytes": _resident(memory, windowed)}


def journal_rows(step: int, windowed: WindowedLayers, method: Method) -> list[JournalRow]:
    """Return what the method has noted since the last call, as rows of a step."""
    return [
        JournalRow(
            step,
            None if note.layer is None else windowed.numbers[note.layer],
            note.kv_head,
            note.name,
            note.values.detach().float().numpy(force=True).astype(np.float32).ravel(),
        )
        for note in method.drain_journal()
    ]


def _resident(memory: Memory, windowed: WindowedLayers) -> np.ndarray:
    """Return the bytes per (layer, KV head): its slots with their tables; what all share (span tables, a method's index
    tensors) in equal parts, rounded down."""
    shape, slots = memory.shape, np.zeros((memory.shape.layers, memory.shape.kv_heads))
    for layer in range(shape.layers):
        for heads, zones in memory.layout.parts(layer, shape.kv_heads):
            slots[layer, heads.start : heads.stop] = zones.head_bytes(shape)
    slots = windowed.spread(slots) + windowed.head_bytes
    shared = memory.account.resident - int(slots.sum())
    return slots + max(0, shared) // slots.size


def span_keys(
    keys: torch.Tensor, rows: Sequence[SpanRow], rotate: Callable[..., torch.Tensor] | None
) -> SpanKeys | None:
    """keys [L, H_kv, n, D] of the prompt as the cache holds them; rows: its spans; rotate: the model's rotary
    embedding, taken back before averaging, or None.

    None when there are no spans, or their keys need more than `MOST_KEY_BYTES`. Works on one KV head at a time: as
    much memory as float32 keys of it.
    """
    layers, kv_heads, n, head_dim = keys.shape
    known_values = [row for row in rows if row.tok_start < min(row.tok_end, n)]
    if not known_values or span_key_bytes(layers, kv_heads, len(known_values), head_dim) > instruments.MOST_KEY_BYTES:
        return None
    owner = torch.full((n,), len(known_values), dtype=torch.long)
    for index, row in enumerate(known_values):
        owner[row.tok_start : row.tok_end] = index
    counts = (
        torch.bincount(owner, minlength=len(known_values) + 1)[: len(known_values), None].clamp(min=1).to(keys.device)
    )
    owner, positions = owner.to(keys.device), torch.arange(n, device=keys.device)
    means = np.empty((layers, kv_heads, len(known_values), head_dim), np.float32)
    for layer, head in np.ndindex(layers, kv_heads):
        part = keys[layer, head, None]
        plain = part.float() if rotate is None else rotate(part, positions, layer, back=True).float()
        sums = plain.new_zeros(1, len(known_values) + 1, head_dim).index_add_(1, owner, plain)[0, :-1]
        means[layer, head] = (sums / counts).numpy(force=True)
    return SpanKeys(
        "post-rope" if rotate is None else "pre-rope", np.array([row.span for row in known_values], np.int32), means
    )
