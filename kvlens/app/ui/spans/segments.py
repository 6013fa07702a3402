"""The Spans page: what became of the named parts of the prompt."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.ui.common.chart import menu
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.instructions import followed_instructions
from kvlens.lens.segments import eviction_sentences, segment_table
from kvlens.text.windows import window_sentence

MOST_SENTENCES = 3
"""segments of which the page says that KV heads lost them whole"""


def segments(reader: TraceReader) -> None:
    """A row per segment, and a sentence for those that KV heads lost whole; nothing where the prompt has no parts."""
    if not reader.meta.segments:
        return
    table = _table(reader, reader.uid, reader.stamp)
    st.markdown("##### What became of the prompt's segments")
    number = st.column_config.NumberColumn(format="%.3f")
    full = "full KV's mass" if reader.has_reference_masses() else "full attention's mass"
    shares = ("kept on the device", "evicted", full, "this run's mass")
    shown = pd.DataFrame(
        {
            "segment": table["segment"],
            "tokens": table["tokens"],
            "kept on the device": table["kept_share"],
            "evicted": table["evicted_share"],
            "KV heads that lost it whole": [
                f"{lost} of {heads}" for lost, heads in zip(table["evicted_heads"], table["heads"], strict=True)
            ],
            full: table["full_mass"],
            "this run's mass": table["mass"],
            "largest effect (logits)": table["largest_effect"],
        }
    )
    st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        column_config=dict.fromkeys((*shares, "largest effect (logits)"), number),
    )
    menu(table, f"{reader.uid}-segments", "segment_rows", image=False)
    lines = eviction_sentences(table, str(reader.meta.method))[:MOST_SENTENCES]
    lines += [each.sentence for each in followed_instructions(reader.meta)]
    if reader.meta.windows:
        lines.append(window_sentence(reader.meta.windows))
    lines.append(
        "Shares are means over the KV heads on which the method acts, after the last step. Masses and effects are "
        "estimates: a span across a border counts for each segment by its tokens there. The mass of the window's "
        "tokens is not counted. Masses are means over sampled steps. The largest effect is of one KV head and "
        "one span; effects are of different rounds and do not add up."
    )
    st.caption(plain(" ".join(lines)))


@st.cache_data(max_entries=8, show_spinner=False)
def _table(_reader: TraceReader, uid: str, stamp: object) -> pd.DataFrame:
    return segment_table(_reader)
