"""The words above a replay: what the run is, and its verdict in sentences."""

from __future__ import annotations

from kvlens import methods
from kvlens.lens.condition import condition
from kvlens.lens.knob import limit_with_format
from kvlens.lens.severity import severity, unmissed_words
from kvlens.lens.verdict import Missed, Verdict
from kvlens.methods.naming import run_name
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage
from kvlens.text.words import STATES

QUOTED = 80
"""characters of a span's text in the verdict, at most"""


def method_title(reader: TraceReader) -> str:
    """Return what the run's method is called, its untrained parts included."""
    return run_name(reader.meta)


def facts(reader: TraceReader) -> list[tuple[str, str]]:
    """Return (label, value) of the run: condition, method, budget, decode steps, uid."""
    meta = reader.meta
    preset = f", preset {meta.preset}" if meta.preset else ""
    return [
        ("condition", condition([reader])),
        ("method", f"{method_title(reader)}{preset}"),
        ("budget", limit_with_format(meta)),
        ("decode steps", f"{reader.n_steps:,}"),
        ("run", reader.uid),
    ]


def verdict_sentences(reader: TraceReader, found: Verdict | None) -> list[str]:
    """Return the verdict as sentences: the loss, then the span missed most and the reason; or why there is none."""
    if found is None:
        return [_no_loss(reader)]
    how = severity(reader, found)
    means = how.sentence()
    ending = f" {means[0].upper()}{means[1:]}." if means else ""
    loss = f"{how.headline(found.step)}. Full KV's token is {found.expected!r}, this run's is {found.got!r}.{ending}"
    if found.missed is None:
        words = unmissed_words(found, how)
        return [loss, f"What was missed: {words}."]
    return [loss, *_missed(reader, found.missed)]


def _no_loss(reader: TraceReader) -> str:
    if steps := len(reader.loss()):
        return f"No loss: at all {steps} compared steps, the most probable token equals full KV's."
    if reader.meta.method == methods.REFERENCE:
        return "This run is full KV itself."
    return "The loss against full KV was not recorded."


def _missed(reader: TraceReader, missed: Missed) -> list[str]:
    text = " ".join(passage(reader.tokens(), missed.tok_start, missed.tok_end).split())
    quoted = text if len(text) <= QUOTED else f"{text[:QUOTED].rstrip()}…"
    state = "" if missed.state is None else f", {STATES[missed.state]}"
    return [
        f"Missed most by L{missed.layer} KV{missed.kv_head}: span {missed.span}{state}, “{quoted}”.",
        f"Reason: {missed.reason.says}.",
    ]
