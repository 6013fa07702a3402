"""Runs by prompt: each prompt once, with what every run answered."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.ui.common.comparing import compare_link
from kvlens.app.ui.home.runtable import run_table
from kvlens.lens.listing import Told
from kvlens.text.plaintext import visible

MOST = 10
"""prompts that are shown at once"""


def by_prompt(table: pd.DataFrame, found: list[Told | None]) -> list[str]:
    """Draws the prompts, that of the newest run first, and returns the runs that are ticked."""
    groups: dict[str, list[int]] = {}
    for row, one in enumerate(found):
        groups.setdefault((one.prompt or "") if one is not None else "", []).append(row)
    ticked: list[str] = []
    every = len(groups) <= MOST or st.toggle(
        f"Show all {len(groups)} prompts", key="runs_every_prompt", persist_state="session"
    )
    for prompt, rows in list(groups.items())[: None if every else MOST]:
        with st.container(border=True):
            ticked += _one(prompt, table.iloc[rows].reset_index(drop=True), [found[row] for row in rows])
    return ticked


def _one(prompt: str, table: pd.DataFrame, found: list[Told | None]) -> list[str]:
    known = next((one for one in found if one is not None and one.prompt), None)
    left, right = st.columns([6, 1], vertical_alignment="center")
    if not prompt or known is None:
        left.text("Prompts that were not kept, or not read yet")
    else:
        between = f"{known.begins[:80]} … {known.ends[-120:].partition(' ')[2]}"
        left.text(visible(known.ends if known.begins == known.ends else between))
        with right:
            compare_link(list(map(str, table["uid"])))
        st.caption(visible(score(found)))
    return run_table(table, found, ("expected", "task", "prompt tokens"))


def score(found: list[Told | None]) -> str:
    """'Expected 4172: 2 of 3 right; 1 left full KV.', of the runs of one prompt."""
    came = [one.outcome for one in found if one is not None]
    known = [one.right for one in came if one.right is not None]
    expected = next((one.expected for one in came if one.expected), None)
    said = [f"Expected {expected}"] if expected else []
    said += [f"{sum(known)} of {len(known)} right"] if known else []
    compared = [one for one in came if {"lost", "diverged", "kept"} & set(one.kinds)]
    if compared:
        said.append(f"{sum(one.lost_at is not None for one in compared)} of {len(compared)} left full KV")
    return "; ".join(said) or "No answer is known"
