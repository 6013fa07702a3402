"""The Memory page's account of bytes that were moved to the device and, as far as was recorded, not used there."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.figures.memory import mass_curve, use_of_copies
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.memory import data as memorydata
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes

DEFINITION = (
    "A span was moved and not used if no query head of its KV head had the span among its recorded top spans. This "
    "holds for every step at which the copy could be read. It is a bound, not a proof. Such a query head gave the span "
    "at most its tail mass and at most the least mass that it listed. The tail mass is that of all spans that a head "
    "did not list. Mass is recorded per span with its summary, so use may be overstated. A copy can be read from its "
    "step to the step at which the span was given up. A background copy can be read from the step of its arrival."
)


def use(reader: TraceReader, copies: pd.DataFrame) -> None:
    """Definition, bytes per step by recorded use, how much attention they got, the copies as a table; the price of
    truncated reuse."""
    st.markdown("##### Moved, and not used")
    if copies.empty:
        st.info(parts.unmoved(reader, sentences.NOTHING_MOVED_IN_VAIN))
        return
    if not memorydata.judged(copies):
        st.info(sentences.USE_NOT_KNOWN)
    else:
        st.caption(DEFINITION)
        left_column, right = st.columns(2, gap="medium")
        name = f"{reader.uid}-use-of-copies"
        with left_column:
            chart(
                use_of_copies(copies, reader.n_steps),
                copies,
                name,
                "use_of_copies",
                "Bytes to the device per step, by recorded use",
            )
        with right:
            chart(mass_curve(copies), copies, name, "mass_curve", "Share of moved bytes by the attention they got")
        st.caption(summary(copies))
    _truncation(reader)


def summary(copies: pd.DataFrame) -> str:
    """The sums in words."""
    total = float(copies["bytes"].sum())
    rows = copies.groupby("verdict")["bytes"].sum()
    unlisted = copies[copies["verdict"] == "unlisted"]
    idle = float(rows.get("unlisted", 0))
    sentence = (
        f"Of {si_bytes(total)} moved to the device, {si_bytes(idle)} ({idle / total:.1%}) were never among "
        f"the top spans of a query head"
    )
    if len(unlisted):
        sentence += (
            f"; no query head gave one of these spans more than {unlisted['at_most'].max():.2g} of its "
            f"attention at a step"
        )
    rest = (
        ("pending", "had not arrived when the run ended"),
        ("no span", "name no span"),
        ("not recorded", "moved where none were recorded"),
    )
    for verdict, words in rest:
        if rows.get(verdict, 0):
            sentence += f"; {si_bytes(float(rows[verdict]))} {words}"
    return (
        f"{sentence}. On the right, a copy that was not listed is drawn at its bound."
        if len(unlisted)
        else f"{sentence}."
    )


def _truncation(reader: TraceReader) -> None:
    """What moving more than the ideal cost, where the ideal is recorded."""
    lost = reader.truncation()
    if lost.empty:
        st.caption(
            "The price of truncated reuse was not recorded: no step of this run truncated its reuse. The price is the "
            "bytes moved although the token was on the device."
        )
        return
    moved, ideal = float(lost["moved_bytes"].sum()), float(lost["ideal_bytes"].sum())
    share = f" ({moved / ideal - 1:.1%} more)" if ideal else ""
    st.caption(
        f"The price of truncated reuse: {si_bytes(moved)} moved to the device, in {int(lost['cells'].sum()):,} "
        "recorded cases (step × layer × KV head). Reusing every wanted token on the device would have moved "
        f"{si_bytes(ideal)}. The difference is {si_bytes(moved - ideal)}{share}."
    )
    parts.download(lost, f"{reader.uid}-truncation", "Download truncation by KV head as CSV")
