"""The Spans page: the run again with its budget divided over the segments, and what each segment kept then."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import data, lensdata, lensjobs
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.request import TryChoice
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.fair import fair_change, fair_table
from kvlens.lens.tries import Try
from kvlens.store.errors import TraceError

HELP = "Repeats the run. Every segment keeps the same share of its tokens, at the same budget."


def fair_shares(reader: TraceReader) -> None:
    """A button that repeats the run so that each segment keeps the same share, and the outcome of the repeat; a
    sentence where the method has no scores to divide. Nothing for a prompt
    without segments, for full KV and for runs that kvlens did not steer."""
    meta = reader.meta
    if not meta.segments or not meta.is_steered or meta.method == methods.REFERENCE:
        return
    try:
        change = fair_change(meta)
    except ValueError as refused:
        st.caption(plain(f"The budget cannot be divided over the segments: {refused}"))
        return
    job = lensjobs.job_of(reader.uid)
    if job is not None:
        lensjobs.follow(job)
        return
    trial = next((each for each in lensdata.tries(reader.uid, data.runs_lately()) if each.changed == change), None)
    if trial is not None and _show_outcome(reader, trial):
        return
    if st.button("Divide the budget over the segments", icon=":material/balance:", help=HELP, key="fair_segments"):
        st.query_params["job"] = lensjobs.start_whatif(reader.uid, TryChoice((), 0, tuple(change.items())))
        st.rerun()


def _show_outcome(reader: TraceReader, trial: Try) -> bool:
    """Draw each segment's share before and after. Return False if the repeat cannot be read."""
    try:
        table = _table(reader, data.open_run(trial.uid), trial.uid)
    except TraceError:
        return False
    st.markdown("##### What each segment keeps if the budget is divided fairly")
    number = st.column_config.NumberColumn(format="%.3f")
    names = {"kept_before": "kept in this run", "kept_after": "kept if divided fairly"}
    shown = table.rename(columns=names)
    st.dataframe(shown, hide_index=True, width="stretch", column_config=dict.fromkeys(names.values(), number))
    words = None if trial.summary is None else trial.summary.answer_after
    answer = "" if words is None else f" It answers: {words.strip()!r}."
    lost_nothing = trial.summary is not None and trial.summary.restored is None
    outcome = "this run had lost nothing" if lost_nothing else trial.outcome()
    st.caption(
        plain(
            f"Outcome of the repeat {trial.uid}: {outcome}.{answer} Both runs have the same budget. The window "
            "counts for its segment, so a short segment at the end can keep more than the others."
        )
    )
    return True


@st.cache_data(max_entries=8, show_spinner=False)
def _table(_run: TraceReader, _repeat: TraceReader, uid: str) -> pd.DataFrame:
    return fair_table(_run, _repeat)
