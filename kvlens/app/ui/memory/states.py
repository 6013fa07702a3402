"""The Memory page's map of spans over steps for one KV head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.states import rows_at_once, state_grid, state_map
from kvlens.app.ui.common import session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.memory import data as memorydata
from kvlens.store.reader import TraceReader


def where_spans_lay(reader: TraceReader, selection: Selection) -> None:
    """Choice of the KV head and the map; its data are the births and changes it was replayed from."""
    st.markdown("##### Where each span lay")
    spans = memorydata.spans_in_text_order(reader)
    if spans.empty:
        st.info("This run recorded no spans, so their states were not recorded.")
        return
    layer, kv_head = _choice(reader, selection)
    changes = reader.state_changes(layer, kv_head)
    shown, start = _rows(spans, rows_at_once(reader.n_steps), reader.uid, selection.span)
    grid = state_grid(shown, changes, reader.n_steps)
    title = f"State of spans for L{layer} KV{kv_head} at the end of each step"
    chart(
        state_map(shown, grid, title, selection.step or 0, selection.span),
        changes,
        f"{reader.uid}-states-l{layer}-kv{kv_head}",
        "state_map",
        title,
    )
    if len(shown) < len(spans):
        st.caption(
            f"{len(shown)} of {len(spans)} spans are shown, numbers {start} to {start + len(shown) - 1} in text order; "
            "the slider shows the others."
        )
    lacking = reader.meta.lacks("event")
    moved = int((changes["step"] >= 0).sum())
    note = "No span changed its state while decoding." if not moved else f"{moved} births and changes while decoding."
    note += " Replayed from the recorded events"
    if lacking:
        note = "Events were not recorded in this run, so states after birth are not known"
    st.caption(
        "One row per span ever made, in text order, with the tokens that it began with. The window's row has the "
        f"tokens that no other span holds. {note}; colours as in Replay."
    )


def _choice(reader: TraceReader, selection: Selection) -> tuple[int, int]:
    """Layer and KV head of the shared selection, to be changed here too."""
    group = reader.q_heads // reader.kv_heads
    layer, kv_head = selection.layer or 0, (selection.head or 0) // group
    first_column, second, _ = st.columns([2, 2, 8])
    session.follow("memory_layer", layer)
    session.follow("memory_kv_head", kv_head)
    first_column.selectbox(
        "Layer", range(reader.n_layers), key="memory_layer", on_change=_changed("layer", "memory_layer", 1)
    )
    second.selectbox(
        "KV head",
        range(reader.kv_heads),
        key="memory_kv_head",
        format_func=lambda head: f"KV{head}",
        on_change=_changed("head", "memory_kv_head", group),
    )
    return layer, kv_head


def _changed(field: str, key: str, times: int) -> Callable[[], None]:
    """A KV head is selected by its first query head."""
    return lambda: session.change({field: int(st.session_state[key]) * times})


def _rows(spans: pd.DataFrame, most: int, uid: str, selected: int | None) -> tuple[pd.DataFrame, int]:
    """The spans to show and the number of the first; all where they fit, else those the slider says."""
    if len(spans) <= most:
        return spans, 0
    key, last = f"memory_rows_{uid}", len(spans) - most
    if key not in st.session_state:
        place = np.flatnonzero(spans["span"] == selected) if selected is not None else np.empty(0)
        st.session_state[key] = min(last, max(0, int(place[0]) - most // 2)) if len(place) else 0
    start = int(st.slider(f"First of the {most} spans shown, in text order", 0, last, key=key, persist_state="session"))
    return spans.iloc[start : start + most].reset_index(drop=True), start
