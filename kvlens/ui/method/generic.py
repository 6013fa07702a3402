"""The view of any method: what moved, what it cost, what the method noted."""

from __future__ import annotations

import streamlit as st

from kvlens.store.reader import TraceReader
from kvlens.ui.common import parts
from kvlens.ui.method.journal import journal


def show(reader: TraceReader) -> None:
    """Transfers side by side with their cost, below them the journal."""
    left, right = st.columns(2, gap="medium")
    with left:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)
    journal(reader)
