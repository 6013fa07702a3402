"""The end of the Memory page: how large the run's trace is, and the run as a file that Perfetto opens."""

from __future__ import annotations

import io
from functools import partial

import streamlit as st

from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.store.export import TIMELINE, export
from kvlens.text.units import si_bytes

_HALF = 2
"""bytes of an attention weight in float16"""


def trace_file(reader: TraceReader) -> None:
    """Draw the section: the size of the trace, and the download."""
    st.markdown("##### The trace, and a timeline for Perfetto")
    st.caption(plain(size_text(reader)))
    st.caption(
        "Steps and copies as slices, bytes per tier as counters, in the Trace Event Format; open the file at "
        "ui.perfetto.dev or chrome://tracing. Copies of one direction that overlap are spread over several lanes."
    )
    st.download_button(
        "Chrome trace (JSON)",
        partial(_timeline, reader),
        f"{reader.uid}-chrome-trace.json",
        "application/json",
        key="chrome_trace",
        on_click="ignore",
        icon=":material/download:",
    )


def size_text(reader: TraceReader) -> str:
    """Say what the trace takes, and what the attention weights of one step would."""
    steps, prompt = max(1, reader.n_steps), int(reader.tokens()["step"].isna().sum())
    weights = reader.n_layers * reader.q_heads * prompt * _HALF
    return (
        f"The file of the trace has {si_bytes(reader.trace_bytes)}: {si_bytes(reader.trace_bytes / steps)} for each "
        f"decode step on average. In float16 all attention weights of one step, from every query head to every token "
        f"of the prompt, would take {si_bytes(weights)}."
    )


def _timeline(reader: TraceReader) -> bytes:
    out = io.BytesIO()
    export(reader, TIMELINE, "json", out)
    return out.getvalue()
