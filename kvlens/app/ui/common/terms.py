"""The terms of a page, each explained on hover by the glossary, with the same text as docs/glossary.md."""

from __future__ import annotations

import html

import streamlit as st

from kvlens.text.glossary import meaning

TERMS = {
    "Runs": ("run", "budget", "reference", "needle", "race", "step of loss"),
    "New run": ("prefill", "budget", "preset", "reference", "needle", "full KV"),
    "Study": ("full KV", "budget", "restored", "ledger", "cause"),
    "Replay": ("step of loss", "effect", "lead", "regret", "attention mass", "hold", "restored", "ledger"),
    "Heads": ("query head", "KV head", "attention mass", "coverage", "regret", "needle"),
    "Spans": ("span", "state", "summary", "window", "sink", "regret"),
    "Method": ("selection", "decision", "recall", "eviction", "parameter"),
    "Memory": ("device", "host memory", "recall", "budget", "state"),
    "Compare": ("step of loss", "forced run", "coverage", "regret", "full KV"),
    "Benchmarks": ("budget", "coverage", "selection", "hold", "full KV"),
}
"""title of a page -> the glossary's terms that it uses"""


def explained(term: str) -> str:
    """Return a term as HTML that shows its meaning on hover and to screen readers."""
    return f'<abbr title="{html.escape(meaning(term))}" tabindex="0">{html.escape(term)}</abbr>'


def show_terms(title: str) -> None:
    """Draw the terms of a page in one line; nothing for a page without terms."""
    terms = TERMS.get(title, ())
    if terms:
        words = " · ".join(map(explained, terms))
        st.html(f'<span style="font-size:.8rem;opacity:.75">Terms: {words}</span>', width="content")
