"""Effects that are still being computed when Replay opens."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.data import TraceReader
from kvlens.store.amend import PENDING, is_outstanding

POLL_S = 2.0


def effects_line(reader: TraceReader) -> None:
    """Say that the effects are on their way, and draw the page again when they are there; nothing for other runs."""
    if are_awaited(reader):
        st.fragment(_wait, run_every=POLL_S)(reader.uid, reader.stamp)
    elif reader.meta.no_effects == PENDING and data.open_run(reader.uid).meta.no_effects != PENDING:
        # they were stored after this page opened the trace
        data.forget_runs()
        st.rerun()


def are_awaited(reader: TraceReader) -> bool:
    """Return whether a process computes the run's effects: the verdict may name another span when they are stored."""
    return reader.meta.no_effects == PENDING and is_outstanding(data.runs_dir() / reader.uid)


def _wait(uid: str, stamp: int) -> None:
    """stamp: of the trace that the page shows."""
    if data.stamp(uid) != stamp or not is_outstanding(data.runs_dir() / uid):
        data.forget_runs()
        st.rerun()
    st.caption(
        ":material/hourglass_top: The effects on the choice are being computed. Until then the verdict names what was "
        "missed most by regret."
    )
