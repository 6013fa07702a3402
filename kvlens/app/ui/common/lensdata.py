"""What the runs of a folder have to do with each other: references, forced repeats, what was tried on a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data, lensjobs
from kvlens.lens import trylist as lens
from kvlens.lens.tries import Try
from kvlens.store.errors import TraceError

NONE = "none"
"""?whatif=none: the run as it was recorded, whatever was tried on it"""


def tries(uid: str, table: pd.DataFrame) -> list[Try]:
    """What was tried on a run, newest first. Repeats that cannot be read are left out; the Runs page names them."""
    return lens.tries(uid, table, lambda run_uid: data.open_run(run_uid).meta)


def forced_repeat(uid: str, table: pd.DataFrame) -> str | None:
    """The newest whole run that repeats this one on its reference's tokens, with nothing held or dropped beyond it."""
    whole = truth(table["forced"]) & ~truth(table["changed"]) & (table["status"] == "completed")
    rows = table[(table["parent"] == uid) & whole]
    for run_uid, held in zip(map(str, rows["uid"]), truth(rows["hold"]), strict=True):
        if not held or _as_it_was(run_uid, uid):
            return run_uid
    return None


def _as_it_was(hold: str, uid: str) -> bool:
    """A repeat that holds or drops does so just as the run it repeats; False where either cannot be read."""
    try:
        repeat, had = lens.try_of(data.open_run(hold).meta, hold), data.open_run(uid).meta
    except TraceError:
        return False
    return repeat is not None and repeat.beyond(had).nothing


def roles(table: pd.DataFrame) -> list[str]:
    """What each run is to the others, in words; '' for a run that stands alone."""
    references = table["reference"].dropna().value_counts()
    words = []
    for _, row in table.iterrows():
        if _is_trial(row):
            words.append(f"what-if of …{row['parent'][-6:]}" if _text(row["parent"]) else "what-if")
        elif _text(row["reference"]):
            words.append("against full KV, forced" if _true(row["forced"]) else "against full KV")
        elif row["uid"] in references.index:
            words.append(f"reference of {references[row['uid']]}")
        else:
            words.append("")
    return words


def owners(table: pd.DataFrame) -> list[str | None]:
    """For each run the stored one it belongs under: what a repeat repeats, the newest run that a reference was made
    for; None for a run that stands by itself. Nothing stands under a run that itself stands under another."""
    stored: set[str] = set(table["uid"])
    under: dict[str, str] = {}
    for _, row in table.iterrows():
        if row["parent"] in stored and (_is_trial(row) or _true(row["forced"])):
            under[row["uid"]] = row["parent"]
    for _, row in table.iterrows():
        if row["reference"] in stored:
            under.setdefault(row["reference"], row["uid"])

    def top(uid: str) -> str | None:
        """Whoever wrote a run.json may have made a circle of it: then each stands by itself."""
        visited = {uid}
        while (above := under.get(uid)) is not None:
            if above in visited:
                return None
            visited.add(uid := above)
        return uid

    return [top(uid) if uid in under else None for uid in map(str, table["uid"])]


def related(table: pd.DataFrame, uid: str) -> list[tuple[str, str]]:
    """(in words, uid) of the stored runs that a run belongs with: its reference, what it repeats, what repeats it; at
    most eight."""
    row = table[table["uid"] == uid].iloc[0]
    stored = set(table["uid"])
    entries = [
        (label, str(row[column]))
        for column, label in (("reference", "Its full-KV reference"), ("parent", "The run it repeats"))
        if row[column] in stored
    ]
    for _, repeat in table[table["parent"] == uid].iterrows():
        label = "What-if" if _is_trial(repeat) else "Forced repeat"
        entries.append((f"{label} of {str(repeat['created'])[11:16]}", str(repeat["uid"])))
    return entries[:8]


def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Each run as a dictionary of its columns."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def truth(column: pd.Series) -> pd.Series:
    """A column of true, false and not recorded as booleans."""
    return column.map(_true).astype(bool)


def _true(value: object) -> bool:
    return value is not None and value == value and bool(value)


def _is_trial(row: Mapping[str, Any] | pd.Series) -> bool:
    """The run is a what-if: something was held, or asked for otherwise."""
    return _true(row.get("hold")) or _true(row.get("changed"))


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def of_this_run(uid: str) -> dict[str, str]:
    """The parts of the URL that belong to the Replay page of this run alone: a job that repeats it, a repeat that is
    looked at."""
    extra = {}
    if lensjobs.job_of(uid) is not None:
        extra["job"] = st.query_params["job"]
    requested = st.query_params.get("whatif")
    if requested == NONE or (requested and requested in set(data.runs_lately().query("parent == @uid")["uid"])):
        extra["whatif"] = requested
    return extra
