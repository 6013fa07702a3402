"""What came of each run, for the table of runs: right or lost, where, and what was expected. Read from the traces, each
once."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import streamlit as st

from kvlens.lens.severity import Outcome, outcome
from kvlens.store.reader import RunBusy, TraceError, TraceReader
from kvlens.ui.common import data

LOOK_S = 1.0
"""how long one look at the table may read traces that were not read before; the rest is read at the next"""
UNREAD = "not read yet"


def outcomes(table: pd.DataFrame) -> list[Outcome]:
    """In the order of the table, newest first."""
    folder, found = data.runs_dir(), []
    began = time.monotonic()
    known: dict[tuple[str, int], Outcome] = _known(str(folder))
    for uid in map(str, table["uid"]):
        place = uid, data.stamp(uid)
        if place not in known and time.monotonic() - began < LOOK_S:
            try:
                known[place] = _outcome(folder, uid)
            except RunBusy:  # it is being written, and will be another when it has ended
                found.append(Outcome(""))
                continue
        found.append(known.get(place, Outcome(UNREAD)))
    return found


@st.cache_resource(max_entries=4, show_spinner=False)
def _known(folder: str) -> dict[tuple[str, int], Outcome]:
    """(uid, when its trace was last changed) -> what was read of it, for all sessions of this server."""
    return {}


def _outcome(folder: Path, uid: str) -> Outcome:
    try:
        with TraceReader.open(folder, uid) as reader:
            return outcome(reader)
    except RunBusy:
        raise
    except TraceError:
        return Outcome("")
