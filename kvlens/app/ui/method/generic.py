"""The view of any method: what it dropped, what it read, how it ranked, what moved, what it cost, what it noted."""

from __future__ import annotations

import numpy as np
import streamlit as st

from kvlens.app.figures.journal import curves
from kvlens.app.figures.theme import whole_ticks
from kvlens.app.ui.common import parts
from kvlens.app.ui.common.ranking import ranking
from kvlens.app.ui.method.cuts import cuts
from kvlens.app.ui.method.journal import journal
from kvlens.store.reader import TraceReader
from kvlens.text.units import full_kv, si_bytes


def show(reader: TraceReader) -> None:
    """What was dropped for good, what steps read and how spans were ranked for it, transfers side by side with their
    cost, below them the journal."""
    dropped = cuts(reader)
    read(reader)
    ranked = ranking(reader)
    left_column, right = st.columns(2, gap="medium")
    with left_column:
        parts.bytes_by_cause(reader)
    with right:
        parts.times(reader)
    if not (dropped or ranked) or reader.journal_names():
        journal(reader)


def read(reader: TraceReader) -> None:
    """Bytes that every decode step reads, of all layers and KV heads; nothing where they were not recorded."""
    if "read_bytes" not in reader.kv_metrics():
        return
    steps = np.arange(reader.n_steps)
    each = reader.kv_cube("read_bytes").sum((1, 2))
    recorded = each[np.isfinite(each)]
    if not len(recorded):
        return
    st.markdown("##### What it read")
    figure = curves({"": (list(steps), list(each))}, "bytes read per step")
    figure.update_xaxes(**whole_ticks(reader.n_steps))
    figure.update_yaxes(tickformat="~s", ticksuffix="B", rangemode="tozero")
    parts.draw(reader, figure, key="read_bytes", alt="Bytes read by each decode step")
    mean, full = float(recorded.mean()), reader.meta.full_kv_bytes
    whole = full_kv(reader.meta.dtype)
    share = f", {mean / full:.1%} of {whole} of the prompt and all tokens asked for ({si_bytes(full)})" if full else ""
    st.caption(
        f"Keys and values of the entries that heads attend, and what was read of the method's index: "
        f"{si_bytes(mean)} per step, mean{share}."
    )
