"""What came of each run, for the table of runs: right or lost, where, and what was expected. Read from the traces, each
once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import streamlit as st

from kvlens.lens.severity import right, severity
from kvlens.lens.verdict import verdict
from kvlens.store.reader import TraceError, TraceReader
from kvlens.ui.common import data

LOOK_S = 1.0
"""how long one look at the table may read traces that were not read before; the rest is read at the next"""
UNREAD = "not read yet"


@dataclass(frozen=True)
class Outcome:
    """Of one run; None: not recorded, or there is none."""

    words: str
    """'right answer', 'wrong answer', 'nothing lost'; '' where nothing is known"""
    expected: str | None = None
    lost_at: int | None = None
    """the first step whose most probable token is not full KV's"""
    kl: float | None = None
    """nats, there"""


def outcomes(table: pd.DataFrame) -> list[Outcome]:
    """In the order of the table, newest first."""
    folder, found = data.runs_dir(), []
    began = time.monotonic()
    known: dict[tuple[str, int], Outcome] = _known(str(folder))
    for uid in map(str, table["uid"]):
        place = uid, data.stamp(uid)
        if place not in known and time.monotonic() - began < LOOK_S:
            known[place] = _outcome(folder, uid)
        found.append(known.get(place, Outcome(UNREAD)))
    return found


@st.cache_resource(max_entries=4, show_spinner=False)
def _known(folder: str) -> dict[tuple[str, int], Outcome]:
    """(uid, when its trace was last changed) -> what was read of it, for all sessions of this server."""
    return {}


def _outcome(folder: Path, uid: str) -> Outcome:
    try:
        with TraceReader.open(folder, uid) as reader:
            answer, expected = right(reader), reader.meta.answer
            found = verdict(reader, missed=False)
            if found is not None:
                return Outcome(severity(reader, found).words(), expected, found.step, found.kl)
            compared = len(reader.loss()) > 0
    except TraceError:
        return Outcome("")
    if answer is None:
        return Outcome("nothing lost" if compared else "", expected)
    return Outcome("right answer" if answer else "wrong answer, as full KV" if compared else "wrong answer", expected)
