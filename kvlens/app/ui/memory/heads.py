"""Bytes by layer and KV head on the Memory page."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures import memory as figures
from kvlens.app.ui.common import parts, sentences, session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.clicks import cell_clicked
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.memory import data as memorydata


def by_head(reader: TraceReader, selection: Selection, copies: pd.DataFrame) -> None:
    """Two maps of bytes by layer and KV head; a click selects the head on every page."""
    st.markdown("##### Bytes by layer and KV head")
    frame = memorydata.head_bytes(reader, copies)
    group = reader.q_heads // reader.kv_heads
    cell = selection.layer or 0, (selection.head or 0) // group
    names = [name for name in memorydata.MAPS if (frame[name] > 0).any()]
    left_column, right = st.columns(2, gap="medium", vertical_alignment="bottom" if names else "top")
    with left_column:
        _map(reader, frame, "resident_bytes_mean", sentences.ON_DEVICE, cell)
    with right:
        if not names:
            sentence = "Nothing moved between the tiers while decoding, so there is no map of what moved."
            st.info(parts.unmoved(reader, sentence))
        else:
            name = st.selectbox(
                "Bytes",
                names,
                key="memory_map",
                format_func=lambda item: memorydata.MAPS[item],
                persist_state="session",
            )
            text = memorydata.MAPS[str(name)]
            _map(reader, frame, str(name), f"{text[0].upper()}{text[1:]}", cell)
    st.caption(
        f"Click a cell to select its KV head on every page; selected: L{cell[0]} KV{cell[1]}. On the device, a KV head "
        "counts its share of the layer's slots. Span tables, a method's index and staging are shared in equal parts."
    )


def _map(reader: TraceReader, frame: pd.DataFrame, column: str, title: str, cell: tuple[int, int]) -> None:
    values = memorydata.as_map(frame, column, reader.n_layers, reader.kv_heads)
    if not np.isfinite(values).any():
        st.info(f"{title}: not recorded in this run.")
        return
    key = f"memory_map_{column}_{session.revision()}_{cell[0]}_{cell[1]}"
    chart(
        figures.byte_map(values, title, cell, column),
        frame,
        f"{reader.uid}-bytes-by-kv-head",
        key,
        f"{title}, by layer and KV head",
        on_select=lambda: cell_clicked(key, reader.q_heads // reader.kv_heads),
    )
