"""Downloads of per-head statistics."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from kvlens.app.ui.common.widgets import guarded
from kvlens.store.export import csv_bytes, export
from kvlens.store.reader import TraceReader

MANY = 2048
"""query heads whose files are made with the page; 32 layers of 64"""
_MIME = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet"}


def statistics_file(reader: TraceReader, start: int, stop: int, whole: bool, fmt: str) -> bytes:
    """Statistics per query head over steps [start, stop) as 'csv' or 'parquet'; a part of the run names its steps in
    two columns."""
    out = io.BytesIO()
    if whole:
        export(reader, "heads", fmt, out)
        return out.getvalue()
    frame = reader.head_table(start, stop)
    frame.insert(3, "step_first", start)
    frame.insert(4, "step_last", stop - 1)
    if fmt == "csv":
        return csv_bytes(frame)
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), out, compression="zstd")
    return out.getvalue()


@st.cache_data(max_entries=16, show_spinner=False)
def _make_file(_reader: TraceReader, uid: str, changed: int, start: int, stop: int, whole: bool, fmt: str) -> bytes:
    return statistics_file(_reader, start, stop, whole, fmt)


def downloads(reader: TraceReader, start: int, stop: int, whole: bool) -> None:
    """One button per format; of a run with more than MANY query heads behind a menu, which makes the files when it is
    opened."""
    if reader.meta.layers * reader.meta.q_heads > MANY:
        _menu(reader, start, stop, whole)
    else:
        _buttons(reader, start, stop, whole)


@st.fragment
def _menu(reader: TraceReader, start: int, stop: int, whole: bool) -> None:
    icon = ":material/download:"
    shown = st.popover("Per-head statistics", icon=icon, key="download_menu", on_change="rerun")
    if shown.open:
        with shown:
            guarded(lambda: _buttons(reader, start, stop, whole))()


def _buttons(reader: TraceReader, start: int, stop: int, whole: bool) -> None:
    part = "" if whole else f"-steps-{start}-{stop - 1}"
    with st.container(horizontal=True):
        for fmt in ("csv", "parquet"):
            st.download_button(
                f"Per-head statistics as {'CSV' if fmt == 'csv' else 'Parquet'}",
                _make_file(reader, reader.uid, reader.stamp, start, stop, whole, fmt),
                f"{reader.uid}-heads{part}.{fmt}",
                _MIME[fmt],
                key=f"download_{fmt}",
                on_click="ignore",
                icon=":material/download:",
            )
