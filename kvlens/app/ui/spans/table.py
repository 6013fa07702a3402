"""The Spans page: the table of this run's spans, the selected one in full, how long they are."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.figures.spanlengths import length_histogram
from kvlens.app.ui.common import sentences, session
from kvlens.app.ui.common.chart import chart, menu
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.spans.data import View
from kvlens.recording.metrics import head_label
from kvlens.text import words
from kvlens.text.passages import passage
from kvlens.text.plaintext import visible
from kvlens.text.units import si_bytes

_OWN_MOVES = "kvlens_span_rows_clicked"


def table(reader: TraceReader, view: View) -> None:
    """All spans at the selected step; a selected row selects the span on every page."""
    group, selection = reader.q_heads // reader.kv_heads, view.chosen
    label = head_label(selection.layer or 0, selection.head or 0, group)
    st.markdown(f"##### Spans at step {selection.step or 0}, for {label}")
    spans = view.table
    shown = pd.DataFrame(
        {
            "": [
                "●" if span == view.selected else "★" if needle else ""
                for span, needle in zip(spans["span"], spans["needle"], strict=True)
            ],
            "span": spans["span"],
            "kind": spans["kind"],
            "tokens": [
                f"{a}–{b - 1}" if b > a + 1 else f"{a}"
                for a, b in zip(spans["tok_start"], spans["tok_end"], strict=True)
            ],
            "length": spans["length"],
            "text": spans["text"],
            "mean surprisal (nats)": spans["mean_surprisal"],
            "mass (share)": spans["mass"],
            "full KV's mass (share)": spans["reference"],
            "own-query mass (share)": spans["own"],
            "regret (share)": spans["regret"],
            "state": [words.state(state) for state in spans["state"]],
            "in host memory": [si_bytes(value) if value == value else "–" for value in spans["host_bytes"]],
            "to the device, all steps": [si_bytes(value) for value in spans["moved_bytes"]],
            "how it was cut and placed": spans["reason"],
        }
    )
    number, share = st.column_config.NumberColumn(format="%.3f"), st.column_config.NumberColumn(format="%.4f")
    key = f"span_table_{session.revision() - st.session_state.get(_OWN_MOVES, 0)}"
    st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        height=min(420, 38 + 35 * max(1, len(shown))),
        key=key,
        on_select=lambda: _row_clicked(key, spans),
        selection_mode="single-row",
        column_config={
            "": st.column_config.TextColumn(width=28),
            "text": st.column_config.TextColumn(width="medium"),
            "mean surprisal (nats)": number,
            "mass (share)": share,
            "full KV's mass (share)": share,
            "own-query mass (share)": share,
            "regret (share)": share,
            "how it was cut and placed": st.column_config.TextColumn(width="large"),
        },
    )
    menu(
        spans,
        f"{reader.uid}-spans-step{selection.step or 0}-{label.split(' (')[0].replace(' ', '-')}",
        "span_rows",
        image=False,
    )
    full = "" if spans["reference"].notna().any() else sentences.NO_REFERENCE_MASS
    st.caption(
        f"● selected, ★ holds tokens of the needle. Masses are those of {label} at this step. None: the span is not "
        f"among the head's strongest spans, or nothing was recorded.{full} Bytes are those of the KV head. –: no token "
        "of the span is in host memory. The window's tokens are those of this step."
    )


def _row_clicked(key: str, spans: pd.DataFrame) -> None:
    """The row's own mark stays where it is: only other ways of selecting make a new table."""
    rows = st.session_state[key]["selection"]["rows"]
    if rows:
        st.session_state[_OWN_MOVES] = st.session_state.get(_OWN_MOVES, 0) + 1
        session.change({"span": int(spans["span"].iloc[rows[0]])})


def selected(reader: TraceReader, view: View) -> None:
    """The selected span's text and reason."""
    if view.selected is None:
        st.caption("No span is selected; click one in a chart or in the table.")
        return
    rows = view.table[view.table["span"] == view.selected]
    if rows.empty:
        st.caption(f"Span {view.selected} is selected; at step {view.chosen.step or 0} it does not exist.")
        return
    span = rows.iloc[0]
    start, end = int(span["tok_start"]), int(span["tok_end"])
    st.markdown(f"##### Span {view.selected}: tokens {start}–{end - 1}")
    text = passage(reader.tokens(), start, end)
    with st.container(border=True, height=160 if len(text) > 300 else "content"):
        st.text(visible(text))
    st.text(str(span["reason"]))


def lengths(reader: TraceReader, view: View) -> None:
    """How long the spans are."""
    spans = view.table
    selected_length = spans.loc[spans["span"] == view.selected, "length"]
    chart(
        length_histogram(
            spans["length"].to_numpy(),
            spans["kind"].tolist(),
            int(selected_length.iloc[0]) if len(selected_length) else None,
        ),
        spans[["span", "kind", "length"]].rename(columns={"length": "length_tokens"}),
        f"{reader.uid}-span-lengths",
        "span_lengths",
        "How many spans have how many tokens",
    )
