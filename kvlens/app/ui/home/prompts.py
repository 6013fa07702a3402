"""Runs by prompt: each prompt once, with what every run answered."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.ui.common.comparing import compare_link
from kvlens.app.ui.home.runtable import run_table
from kvlens.lens.listing import ListedRun
from kvlens.text.plaintext import visible

MOST = 10
"""prompts that are shown at once"""


def by_prompt(table: pd.DataFrame, listed_runs: list[ListedRun | None]) -> list[str]:
    """Draws the prompts, that of the newest run first, and returns the runs that are ticked."""
    groups: dict[str, list[int]] = {}
    for row, item in enumerate(listed_runs):
        groups.setdefault((item.prompt or "") if item is not None else "", []).append(row)
    ticked: list[str] = []
    every = len(groups) <= MOST or st.toggle(
        f"Show all {len(groups)} prompts", key="runs_every_prompt", persist_state="session"
    )
    for prompt, rows in list(groups.items())[: None if every else MOST]:
        with st.container(border=True):
            ticked += _draw_prompt(prompt, table.iloc[rows].reset_index(drop=True), [listed_runs[row] for row in rows])
    return ticked


def _draw_prompt(prompt: str, table: pd.DataFrame, listed_runs: list[ListedRun | None]) -> list[str]:
    known_values = next((item for item in listed_runs if item is not None and item.prompt), None)
    left_column, right = st.columns([6, 1], vertical_alignment="center")
    if not prompt or known_values is None:
        left_column.text("Prompts that were not kept, or not read yet")
    else:
        between = f"{known_values.begins[:80]} … {known_values.ends[-120:].partition(' ')[2]}"
        left_column.text(visible(known_values.ends if known_values.begins == known_values.ends else between))
        with right:
            compare_link(list(map(str, table["uid"])))
        st.caption(visible(score(listed_runs)))
    return run_table(table, listed_runs, ("expected", "task", "prompt tokens"))


def score(listed_runs: list[ListedRun | None]) -> str:
    """'Expected 4172: 2 of 3 right; 1 left full KV.', of the runs of one prompt."""
    came = [item.outcome for item in listed_runs if item is not None]
    known_values = [item.right for item in came if item.right is not None]
    expected = next((item.expected for item in came if item.expected), None)
    sentence = [f"Expected {expected}"] if expected else []
    sentence += [f"{sum(known_values)} of {len(known_values)} right"] if known_values else []
    compared = [item for item in came if {"lost", "diverged", "kept"} & set(item.kinds)]
    if compared:
        sentence.append(f"{sum(item.lost_at is not None for item in compared)} of {len(compared)} left full KV")
    return "; ".join(sentence) or "No answer is known"
