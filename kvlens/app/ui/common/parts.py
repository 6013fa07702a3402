"""Pieces every method's view may use. Each draws one section: figure, download, and one sentence where nothing was
recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from kvlens.app.figures import transfers
from kvlens.app.figures.drawn import drawn, map_frame
from kvlens.app.figures.heads import head_map as map_figure
from kvlens.app.ui.common import data, sentences, session
from kvlens.app.ui.common.chart import Data, chart
from kvlens.app.ui.common.clicks import cell_clicked
from kvlens.app.ui.common.summaries import summary
from kvlens.app.ui.common.widgets import label as field_label
from kvlens.app.ui.common.widgets import plain
from kvlens.methods.naming import installed_entry
from kvlens.recording.metrics import head_label, metric_of, value_text
from kvlens.store.export import csv_bytes
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted, duration, si_bytes
from kvlens.text.words import COPIES_NOT_RECORDED


def about(reader: TraceReader) -> dict[str, Any] | None:
    """The catalogue's entry of the run's method; None when it is not installed here."""
    return installed_entry(str(reader.meta.method))


def selected(reader: TraceReader) -> tuple[int, int, int]:
    """(step, layer, query head) of the selection that all pages share, inside this run."""
    selection, _ = data.fit(reader, session.selection()[0])
    return selection.step or 0, selection.layer or 0, selection.head or 0


def download(frame: pd.DataFrame, name: str, label: str = "Download as CSV") -> None:
    """Button for `frame`, a small table, as CSV. `name`: the file's, without '.csv'; unique on the page."""
    file = re.sub(r"[^0-9A-Za-z._-]+", "-", name).strip("-")
    st.download_button(
        field_label(label),
        csv_bytes(frame),
        f"{file}.csv",
        "text/csv",
        key=f"download_{name}",
        on_click="ignore",
        icon=":material/download:",
    )


def draw(
    reader: TraceReader,
    figure: go.Figure,
    *,
    key: str,
    alt: str,
    data: Data | None = None,
    on_select: Callable[[], None] | None = None,
) -> None:
    """One chart with its downloads, named after the run and `key`; `data`: the numbers behind it, those that it draws
    when left out."""
    chart(
        figure,
        partial(drawn, figure) if data is None else data,
        f"{reader.uid}-{key.replace('_', '-')}",
        key,
        alt,
        on_select=on_select,
    )


def unmoved(reader: TraceReader, sentence: str) -> str:
    """Return the sentence for a run without copies, or that they were not recorded."""
    return COPIES_NOT_RECORDED if reader.meta.lacks("transfer") else sentence


def bytes_by_cause(reader: TraceReader) -> None:
    """Bytes moved per step by cause, blocking apart from background; what moved at the end of prefill in words."""
    st.markdown("##### What moved")
    table = reader.transfer_times()
    if table.empty:
        st.info(unmoved(reader, sentences.NOTHING_MOVED))
        return
    decode, prefill = table[table["step"] >= 0], table[table["step"] < 0]
    if decode.empty:
        st.info("Nothing moved while decoding.")
    else:
        draw(
            reader,
            transfers.bytes_by_cause(table, reader.n_steps),
            key="parts_bytes",
            alt="Bytes moved per decode step by cause",
            data=table,
        )
    st.caption(
        f"While decoding: {moved_text(decode)}. At the end of prefill: {moved_text(prefill)}. "
        "Solid: the step could not go on without it (blocking); hatched: it ran in the background."
    )


def moved_text(table: pd.DataFrame) -> str:
    """'1.2 MB to device in 3 copies, of that 0 B blocking': sums of a table of `transfer_times`."""
    if table.empty:
        return "nothing"
    parts = []
    for direction, part in table.groupby("direction", sort=True):
        where = transfers.DIRECTIONS.get(str(direction), str(direction))
        parts.append(
            f"{si_bytes(float(part['bytes'].sum()))} {where} in "
            f"{counted(int(part['n'].sum()), 'copy', 'copies')}, of that "
            f"{si_bytes(float(part['blocking_bytes'].sum()))} blocking"
        )
    return "; ".join(parts)


def times(reader: TraceReader) -> None:
    """Per step, time spent moving against time spent waiting."""
    st.markdown("##### What it cost")
    table = reader.transfer_times()
    decode = table[table["step"] >= 0]
    if decode.empty:
        st.info(unmoved(reader, sentences.NO_COPY))
        return
    per_step = decode.groupby("step", as_index=False)[["moving_us", "wait_us", "bytes", "blocking_bytes", "n"]].sum()
    draw(
        reader,
        transfers.waiting(table, reader.n_steps),
        key="parts_times",
        alt="Moving and waiting time per decode step",
        data=per_step,
    )
    steps = reader.steps()
    moving, waited, spent = (float(each.sum()) for each in (decode["moving_us"], steps["wait_us"], steps["dur_us"]))
    share = f", {waited / spent:.1%} of the {duration(spent)} that decoding took" if spent > 0 else ""
    wait = f"The engine waited {duration(waited)} for them{share}."
    if steps["wait_us"].isna().all():
        wait = "How long the engine waited for them was not recorded."
    st.caption(
        plain(
            f"Copies took {duration(moving)} added up; they may overlap each other and the computing. {wait} "
            f"Link: {reader.meta.link or 'not recorded'}."
        )
    )


def head_map(reader: TraceReader, metric: str, title: str) -> None:
    """Map of a metric over layers and query heads, mean over all steps; a click selects the head on every page."""
    st.markdown(f"##### {title}")
    about_it = metric_of(metric)
    values = summary(reader, metric, "mean", 0, reader.n_steps)
    if not np.isfinite(values).any():
        st.info(f"{about_it.title} was not recorded in this run.")
        return
    _, layer, head = selected(reader)
    key = f"parts_map_{metric}_{session.revision()}_{layer}_{head}"
    chart(
        map_figure(values, reader.kv_heads, about_it, (layer, head), "mean over all steps"),
        map_frame(values, reader.kv_heads, about_it, "mean"),
        f"{reader.uid}-{metric}-by-head",
        key,
        f"{about_it.title} by layer and query head",
        on_select=lambda: cell_clicked(key),
    )
    owner = " A figure of the KV head, shown for each of its query heads." if about_it.level == "kv" else ""
    label = head_label(layer, head, reader.q_heads // reader.kv_heads)
    selected_value = value_text(float(values[layer, head]), about_it)
    st.caption(plain(f"{about_it.doc[0].upper()}{about_it.doc[1:]}.{owner} Selected: {label}, {selected_value}."))
