"""The list of runs: what is looked for, the table or the prompts, and what is ticked."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import lensdata, widgets
from kvlens.app.ui.home import reading
from kvlens.app.ui.home.prompts import by_prompt
from kvlens.app.ui.home.runtable import run_table
from kvlens.app.ui.home.search import clear, search
from kvlens.lens.listing import ListedRun
from kvlens.text.units import counted


def run_list(table: pd.DataFrame) -> list[str]:
    """Draws the runs and returns those that are ticked. References and repeats stand under the run they belong to: they
    are counted there, and shown on request or where nothing else is found."""
    target, grouped = search(table)
    roles, owners = lensdata.roles(table), lensdata.owners(table)
    results = reading.read_listed(table)
    takes = [target.takes(row, item) for row, item in zip(lensdata.rows(table), results, strict=True)]
    folded = [row for row, owner in enumerate(owners) if owner is not None and takes[row]]
    rows = [row for row, owner in enumerate(owners) if owner is None and takes[row]]
    label = f"Show references and repeats ({len(folded)})"
    if folded and rows and st.toggle(label, key="runs_whole", persist_state="session"):
        rows = sorted([*rows, *folded])
    elif not rows:
        rows = folded
    else:
        counts = Counter(owner for owner in owners if owner is not None)
        roles = [_with(role, counts[uid]) for role, uid in zip(roles, table["uid"], strict=True)]
    ticked: list[str] = []
    if rows:
        shown = table.assign(role=roles).iloc[rows].reset_index(drop=True)
        listed_runs: list[ListedRun | None] = [results[row] for row in rows]
        ticked = by_prompt(shown, listed_runs) if grouped else run_table(shown, listed_runs)
    else:
        st.info(f"None of the {counted(len(table), 'run')} matches the search.")
        st.button("Show all runs", on_click=clear, icon=":material/filter_alt_off:")
    if remaining := [str(uid) for uid, item in zip(table["uid"], results, strict=True) if item is None]:
        reading.go_on(remaining)
    for problem in table["about_error"].dropna():
        widgets.error(str(problem))
    return ticked


def _with(role: str, more: int) -> str:
    return "; ".join(part for part in (role, f"{more} more" if more else "") if part)
