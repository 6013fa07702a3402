"""Why the runs in the table lost, grouped by model, method, budget and cause; read when it is asked for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data, places, widgets
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.diagnosis import Cause, Diagnosis, Wanted, diagnose
from kvlens.lens.reasonkinds import KINDS
from kvlens.methods.naming import titled
from kvlens.models.find import short_model
from kvlens.text.units import counted

HEADS, RUNS = 4, 6
"""(layer, KV head) pairs and runs that are named of a cause"""


def why_lost(table: pd.DataFrame) -> None:
    """A switch, and below it the causes; nothing where there are no two runs to group."""
    if len(table) < 2 or not st.toggle("Group what was lost by cause", key="runs_causes", persist_state="session"):
        return
    stamps = tuple((uid, data.stamp(uid)) for uid in map(str, table["uid"]))
    results = _diagnosed(str(data.runs_dir()), stamps)
    mild = f"; {results.mild} more diverged at no cost that is known" if results.mild else ""
    st.text(f"{counted(results.compared, 'run')} compared with full KV, {len(results.lost)} lost{mild}.")
    for sentence in results.unread:
        widgets.error(sentence)
    for cause in results.causes:
        with st.container(border=True):
            _draw_cause(cause)


@st.cache_data(max_entries=4, show_spinner="Reading what was lost, run by run")
def _diagnosed(folder: str, stamps: tuple[tuple[str, int], ...]) -> Diagnosis:
    """stamps: the runs there are, and when each trace was last changed."""
    return diagnose(Path(folder), Wanted())


def _draw_cause(cause: Cause) -> None:
    left_column, right = st.columns([2, 3], vertical_alignment="center")
    with left_column:
        widgets.method_mark(cause.method, titled(data.method_title(cause.method), cause.stand_in))
        st.text(f"{len(cause.lost)} lost on {short_model(cause.model)} at {cause.limit}")
    means = KINDS.get(cause.kind, cause.lost[0].says)
    sentences = [f"**{plain(means[0].upper() + means[1:])}.**"]
    if cause.heads:
        heads = ", ".join(f"L{layer} KV{head} ({n} of {len(cause.lost)})" for (layer, head), n in cause.heads[:HEADS])
        sentences.append(f"Missed most by {heads}.")
    holding, known_values = cause.of_the_answer
    if known_values:
        sentences.append(f"In {holding} of {known_values} the span missed most holds part of the answer.")
    right.markdown(" ".join(sentences))
    with right.container(horizontal=True):
        for item in cause.lost[:RUNS]:
            st.page_link(
                "pages/replay.py",
                label=f"…{item.uid[-6:]}, step {item.step}",
                icon=":material/play_circle:",
                query_params=places.in_run(item.uid),
            )
