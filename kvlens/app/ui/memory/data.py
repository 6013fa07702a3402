"""Frames and sums behind the Memory page."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens import intervals
from kvlens.app.ui.common import sentences
from kvlens.intervals import Overlap
from kvlens.store.reader import TraceReader

#: What can be mapped by layer and KV head: column of `head_bytes` -> how the page calls it.
MAPS = {
    "h2d_bytes_total": sentences.MOVED_TO_DEVICE,
    "blocking_bytes_total": "of that, blocking",
    "d2h_bytes_total": "moved to host memory, all steps",
    "unlisted_bytes_total": "moved to the device, never among the top spans",
    "beyond_ideal_bytes_total": "moved to the device beyond the ideal",
}


@st.cache_data(max_entries=8, show_spinner="Looking for what was moved and not used…")
def moved_spans(_reader: TraceReader, uid: str, changed: int) -> pd.DataFrame:
    """As the reader's, kept while the trace stays as it is (`changed`)."""
    return _reader.moved_spans()


def head_bytes(reader: TraceReader, copies: pd.DataFrame) -> pd.DataFrame:
    """One row per layer and KV head: layer, kv_head, resident_bytes_mean and the columns of MAPS; NaN where not
    recorded.

    `copies` as of `moved_spans`. The mean and the totals go over all decode steps of the run."""
    stats = reader.head_table().drop_duplicates(["layer", "kv_head"])
    names = ["resident_bytes_mean", "h2d_bytes_total", "blocking_bytes_total", "d2h_bytes_total"]
    frame = stats[["layer", "kv_head"]].reset_index(drop=True)
    frame[names] = stats[[f"kv_head_{name}" for name in names]].to_numpy(np.float64, na_value=np.nan)
    keys = ["layer", "kv_head"]
    frame["unlisted_bytes_total"] = np.nan
    if judged(copies):
        unlisted = copies[copies["verdict"] == "unlisted"].groupby(keys)["bytes"].sum().rename("found").reset_index()
        frame["unlisted_bytes_total"] = frame.merge(unlisted, on=keys, how="left")["found"].fillna(0.0)
    lost = reader.truncation()
    lost["beyond_ideal_bytes_total"] = lost["moved_bytes"] - lost["ideal_bytes"]
    return frame.merge(lost[[*keys, "beyond_ideal_bytes_total"]], on=keys, how="left")


def judged(copies: pd.DataFrame) -> bool:
    """Whether the records say anything of the use of these copies."""
    return bool(copies["verdict"].isin(("listed", "unlisted")).any())


def as_map(frame: pd.DataFrame, column: str, layers: int, kv_heads: int) -> np.ndarray:
    """A column of `head_bytes` as [L, H_kv]."""
    values = np.full((layers, kv_heads), np.nan)
    values[frame["layer"].to_numpy(np.int64), frame["kv_head"].to_numpy(np.int64)] = frame[column].to_numpy(np.float64)
    return values


def spans_in_text_order(reader: TraceReader) -> pd.DataFrame:
    """All spans, by their first token."""
    return reader.spans().sort_values(["tok_start", "span"], ignore_index=True)


def overlap(steps: pd.DataFrame, copies: pd.DataFrame) -> Overlap:
    """Sums over consecutive `steps` and the `copies` that may have run in their time."""
    start, dur, wait = (steps[name].to_numpy(np.float64) for name in ("t_us", "dur_us", "wait_us"))
    started_job, finished = (copies[name].to_numpy(np.float64) for name in ("start_us", "end_us"))
    return intervals.overlap(start, dur, wait, started_job, finished, copies["blocking"].to_numpy(bool))
