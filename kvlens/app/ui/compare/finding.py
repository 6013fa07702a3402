"""What came of a run in one line: its answer, where it left full KV and what was missed there, what it held and
moved. No Streamlit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlens.app.ui.common.spantext import span_text
from kvlens.lens.output import output_text
from kvlens.lens.severity import Outcome, outcome, severity, unmissed_words
from kvlens.lens.verdict import Missed, Verdict
from kvlens.store.cells import recorded_total
from kvlens.store.reader import TraceReader

EXCERPT = 60
"""characters of a span's text, at most"""


@dataclass(frozen=True)
class Finding:
    """A run beside others. None: not recorded, or there is none."""

    uid: str
    output: str
    """what it was fed where `forced`"""
    full_output: str | None
    """what the full-KV run that it was compared with answered"""
    forced: bool
    outcome: Outcome
    compared: bool
    """it was compared with full KV at some step"""
    missed: str | None
    """the span that was missed most at the step that left full KV, and by which KV head"""
    cause: str | None
    """why it was not attended, in the words that `kvlens diagnose` groups losses by"""
    why: str | None
    """the same of this span and step, in recorded figures, without its full stop"""
    peak_share: float | None
    """largest device-resident KV bytes inside a step / full KV bytes"""
    peak_bytes: float
    h2d_bytes: float
    """moved to the device while decoding"""


def finding(reader: TraceReader, verdict: Verdict | None) -> Finding:
    """verdict: the verdict on the run."""
    meta, steps = reader.meta, reader.steps()
    peak, full = float(steps["peak_bytes"].max()), meta.full_kv_bytes
    missed = None if verdict is None else verdict.missed
    unmissed = None
    if verdict is not None and verdict.nothing_missed:
        unmissed = unmissed_words(verdict, severity(reader, verdict))
    return Finding(
        reader.uid,
        output_text(reader),
        meta.reference_output,
        bool(meta.forced),
        outcome(reader),
        len(reader.loss()) > 0,
        unmissed if missed is None else missed_words(reader, missed),
        None if missed is None else missed.reason.cause,
        None if missed is None else missed.reason.says,
        peak / full if full else None,
        peak,
        recorded_total(steps["h2d_bytes"]),
    )


def missed_words(reader: TraceReader, missed: Missed) -> str:
    """What was missed most, with full KV's mass on it, the own-query mass and the run's. Tokens name it: two runs need
    not have the same spans under the same numbers."""
    where = "the window"
    if missed.kind != "window":
        start, end = missed.tok_start, missed.tok_end
        text = span_text(reader.tokens(), start, end, EXCERPT).strip()
        where = f"span {missed.span} (tokens {start}–{end - 1}) “{text}”"
    return f"{where} by L{missed.layer} KV{missed.kv_head}: {missed.mass_words()}"


def in_focus(findings: Sequence[Finding], references: set[str]) -> str:
    """The run to look at first: one that lost the answer, else one that left full KV, else one that is no reference,
    else the first."""
    tests = (
        lambda item: {"lost", "wrong"} <= set(item.outcome.kinds),
        lambda item: item.outcome.lost_at is not None,
        lambda item: item.uid not in references,
    )
    return next((item.uid for test in tests for item in findings if test(item)), findings[0].uid)
