"""ROC curves on pages: which recorded signal foresees the next lost token, over stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from kvlens.app.figures.roc import roc_curves
from kvlens.app.ui.common import data
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.widgets import plain
from kvlens.ledger.foresight import foresight, roc
from kvlens.ledger.signals import SIGNALS
from kvlens.ledger.tracks import tracks_of_runs
from kvlens.text.units import counted

TITLE = "Which signal foresees a lost token?"


def foreseeing(uids: Sequence[str], stem: str) -> None:
    """Draw a switch, and below it the curves and their areas over the runs. stem: names the downloads."""
    if not uids or not st.toggle(TITLE, key=f"foresight_{stem}", persist_state="session"):
        return
    stamps = tuple((uid, data.stamp(uid)) for uid in uids)
    curves, areas = _measured(str(data.runs_dir()), stamps)
    if curves.empty:
        st.caption("Needs runs that were compared with full KV, with lost and with kept tokens.")
        return
    areas = areas[areas["n"] > 0]
    alt = "One ROC curve per signal: lost tokens that it calls lost, against kept tokens that it calls lost."
    chart(roc_curves(curves, areas), curves, f"{stem}-roc", f"roc_{stem}", alt)
    st.dataframe(
        areas.assign(meaning=areas["signal"].map(SIGNALS)),
        hide_index=True,
        column_config={
            "signal": st.column_config.Column("signal"),
            "n": st.column_config.Column("steps"),
            "lost": st.column_config.Column("lost steps"),
            "answers": st.column_config.Column("runs"),
            "auc": st.column_config.NumberColumn("area", format="%.2f"),
            "low": st.column_config.NumberColumn("95 % low", format="%.2f"),
            "high": st.column_config.NumberColumn("95 % high", format="%.2f"),
        },
        placeholder="—",
    )
    runs = counted(int(areas["answers"].max()), "run")
    st.caption(
        plain(
            f"Steps of {runs} that were compared with full KV. A token is lost if the run's most probable token is "
            "not full KV's. An area of 0.50 foresees nothing. Below 0.50, a smaller signal goes with a loss."
        )
    )


@st.cache_data(max_entries=4, show_spinner="Reading the signals, run by run")
def _measured(folder: str, stamps: tuple[tuple[str, int], ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """stamps: the runs, and when each trace was last changed."""
    tracks = tracks_of_runs(Path(folder), [uid for uid, _ in stamps])
    return roc(tracks), pd.DataFrame(foresight(tracks))
