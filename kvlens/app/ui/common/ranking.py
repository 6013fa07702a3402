"""How a KV head ranked spans at a step: the choice of both, and the scores that the run recorded."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.figures.ranking import ranking as ranking_figure
from kvlens.app.ui.common import parts
from kvlens.store.reader import TraceReader


def heading(reader: TraceReader) -> tuple[int, int, int]:
    """The section's title and its three numbers: (step, layer, KV head), at first those that all pages share."""
    st.markdown("##### How spans were ranked")
    step, layer, head = parts.selected(reader)
    places = st.columns([2, 2, 2, 6], vertical_alignment="bottom")
    request = (
        ("Step", reader.n_steps, step, f"step_{step}"),
        ("Layer", reader.n_layers, layer, f"layer_{layer}"),
        ("KV head", reader.kv_heads, head // (reader.q_heads // reader.kv_heads), f"kv_{head}"),
    )
    rows = [
        int(place.number_input(title, 0, max(0, count - 1), value, key=f"ranked_{reader.uid}_{key}"))
        for place, (title, count, value, key) in zip(places, request, strict=False)
    ]
    return rows[0], rows[1], rows[2]


def ranked(reader: TraceReader, step: int, layer: int, kv_head: int) -> pd.DataFrame:
    """`TraceReader.scores`, and where each span lies (place: 'tokens a–b')."""
    frame, spans = reader.scores(step, layer, kv_head), {row.span: row for row in reader.span_rows()}
    place = [f"tokens {spans[span].tok_start}–{spans[span].tok_end - 1}" for span in frame["span"]]
    listed = frame.assign(place=place)
    listed.attrs = frame.attrs
    return listed


def ranking(reader: TraceReader) -> bool:
    """The section of any method; False, and nothing drawn, where the run ranked no spans."""
    if not reader.ranks_spans():
        return False
    step, layer, kv_head = heading(reader)
    frame = ranked(reader, step, layer, kv_head)
    label = f"L{layer} KV{kv_head} at step {step}"
    if frame.empty:
        st.info(f"No ranking of {label} was recorded: it ranked no spans there.")
        return True
    parts.draw(reader, ranking_figure(frame, label), key="ranking", alt=f"Scores of spans, {label}", data=frame)
    st.caption(
        f"The method's own scores, best first; of {frame.attrs['candidates']} candidates the {len(frame)} best are "
        f"recorded, {int(frame['chosen'].sum())} of them were chosen."
    )
    return True
