"""What an engine hands to a sink: a record when prefill has ended, one for each decode step, and the self-checks.

Arrays and units as in ``rows.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvlens.decisions import Decisions
from kvlens.instruments import CutRow, Loss, Oracle, Scores, SpanKeys
from kvlens.rows import EventRow, JournalRow, PromptToken, SpanHeadRow, SpanRow, TransferRow


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """All that one decode step logs; built once, when its attention has been measured and its copies have ended."""

    step: int
    t_us: int
    """start of the step, us since the run began"""
    dur_us: int
    wait_us: int | None
    """time the engine waited for transfers; None, as of all below: not recorded"""
    record_us: int | None
    """time the engine thread spent recording"""
    token_id: int
    text: str
    logprob: float | None
    """nats, of the token chosen or fed, under the model as this method ran it"""
    next_entropy: float | None
    """entropy in nats of the next-token distribution"""
    resident_bytes: int
    peak_bytes: int
    """largest device-resident KV bytes inside the step"""
    cold_bytes: int | None
    head: dict[str, np.ndarray]
    """HEAD_COLUMNS -> float32 [L, Hq]; a missing key = not recorded"""
    kv: dict[str, np.ndarray]
    """KV_COLUMNS -> float64 [L, Hkv]; a missing key = not recorded"""
    top_span: np.ndarray
    """int32 [L, Hq, K], -1 = none"""
    top_mass: np.ndarray
    """float32 [L, Hq, K]"""
    tail_mass: np.ndarray
    """float32 [L, Hq], mass on the spans that are not among the top K, and what a mean value stands for"""
    transfers: list[TransferRow] = field(default_factory=list)
    tells_transfers: bool = True
    """False: single copies were not recorded, and the step's bytes are those of `kv`, where it has them"""
    events: list[EventRow] = field(default_factory=list)
    spans: list[SpanRow] = field(default_factory=list)
    span_heads: list[SpanHeadRow] = field(default_factory=list)
    journal: list[JournalRow] = field(default_factory=list)
    cuts: list[CutRow] = field(default_factory=list)
    scores: Scores | None = None
    """None: this method does not rank spans, or did not at this step"""
    loss: Loss | None = None
    """None: no reference was given, or the contexts differ by now"""
    oracle: Oracle | None = None
    """None: not recorded, or no layer was sampled at this step"""
    decisions: Decisions | None = None
    """None: nothing was decided"""
    phases: dict[str, int] | None = None
    """microseconds in each phase (kvlens.instruments), together dur_us; None: not timed"""


@dataclass(frozen=True, kw_only=True)
class PrefillRecord:
    """All that is known when prefill has ended and decoding begins."""

    tokens: list[PromptToken]
    spans: list[SpanRow]
    span_heads: list[SpanHeadRow]
    transfers: list[TransferRow]
    events: list[EventRow]
    prefill_us: int | None
    """None, as of the three below: not recorded"""
    prefill_peak_bytes: int | None
    cold_bytes: int | None
    resident_bytes: int | None
    journal: list[JournalRow] = field(default_factory=list)
    cuts: list[CutRow] = field(default_factory=list)
    span_keys: SpanKeys | None = None
    """None: not recorded"""
    decisions: Decisions | None = None
    """None: nothing was decided"""


@dataclass(frozen=True)
class SelfCheck:
    """A check that a run made of itself, and its outcome."""

    name: str
    passed: bool
    value: float | None
    detail: str


class TraceSink(Protocol):
    """Where an engine's records go. The store's writer is one; tests use lists. Calls come from one thread, prefill
    first, then every step in order."""

    def prefill(self, record: PrefillRecord) -> None: ...
    def step(self, record: StepRecord) -> None: ...
