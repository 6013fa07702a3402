"""The view of any method: what it dropped, what moved, what it cost, what the method noted."""

from __future__ import annotations

import streamlit as st

from kvlens.store.reader import TraceReader
from kvlens.ui.common import parts
from kvlens.ui.method.cuts import cuts
from kvlens.ui.method.journal import journal


def show(reader: TraceReader) -> None:
    """What was dropped for good, transfers side by side with their cost, below them the journal."""
    dropped = cuts(reader)
    left, right = st.columns(2, gap="medium")
    with left:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)
    if not dropped or reader.journal_names():
        journal(reader)
