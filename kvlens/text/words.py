"""What pages, reports and the command line call things whose codes stand in traces and exports: one word each. Codes
stay as they are; they become words here and nowhere else (docs/trace-schema.md, Words)."""

from __future__ import annotations

STATES = {
    "resident": "resident",
    "coarse": "summary only",
    "reconstructed": "rebuilt",
    "cold": "in host memory",
    "evicted": "evicted",
    "partial": "partly evicted",
    "quantised": "quantised",
    "partly_recalled": "partly recalled",
    "rewritten": "rewritten",
}
"""where a span lies for a KV head: rows.SPAN_STATES in words"""

STATE_MEANINGS = {
    "resident": "exact tokens on the device",
    "coarse": "one summary entry on the device",
    "reconstructed": "its tokens come from low-rank factors",
    "cold": "no token of it is on the device",
    "evicted": "its tokens are in neither memory any more",
    "partial": "some tokens on the device, the others evicted",
    "quantised": "all tokens on the device, in a few bits each",
    "partly_recalled": "some tokens recalled to the device, the others not",
    "rewritten": "all tokens on the device, some merged or rounded",
}
"""what these mean, for legends"""

COPIES_NOT_RECORDED = "Single copies between the tiers were not recorded in this run."

_EVENTS = {
    "rewrite": "tokens rewritten",
    "part": "partly on the device",
    "thin": "first token evicted",
    "kept": "kept whole",
    "refused": "refused: no room",
}


def state(code: object) -> str:
    """A state in words; a code that is not known as it is, 'not recorded' of None and NaN."""
    return STATES.get(code, code) if isinstance(code, str) else "not recorded"


def event(kind: str) -> str:
    """An event's kind in words."""
    return _EVENTS.get(kind, kind.replace("_", " "))
