"""The table of runs."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import streamlit as st

from kvlens.text.units import si_bytes
from kvlens.ui.common import lensdata, places, widgets
from kvlens.ui.common.frame import short_model
from kvlens.ui.home.outcomes import UNREAD, outcomes


def run_table(table: pd.DataFrame) -> str | None:
    """Draws the runs and returns the uid of the selected row. References and repeats stand under the run they belong
    to: they are counted there and shown on request."""
    roles, owners = lensdata.roles(table), lensdata.owners(table)
    under = [owner for owner in owners if owner is not None]
    whole = bool(under) and st.toggle(
        f"Show references and repeats ({len(under)})", key="runs_whole", persist_state="session"
    )
    counts = Counter(under)
    words = [
        role if whole or not counts[uid] else "; ".join(part for part in (role, f"{counts[uid]} more") if part)
        for role, uid in zip(roles, table["uid"], strict=True)
    ]
    table = table.assign(role=words)
    if not whole:
        table = table[[owner is None for owner in owners]].reset_index(drop=True)
    found = outcomes(table)
    shown = pd.DataFrame(
        {
            "created (UTC)": table["created"].astype(str).str[:19].str.replace("T", " "),
            "status": table["status"],
            "outcome": [one.words for one in found],
            "expected": [_line(one.expected) for one in found],
            "output": table["output_text"].fillna(""),
            "left full KV at step": pd.array([one.lost_at for one in found], "Int64"),
            "KL there (nats)": [one.kl for one in found],
            "model": table["model"].fillna("").map(short_model),
            "method": table["method"].fillna(""),
            "preset": table["preset"].fillna(""),
            "budget": table["budget"]
            .fillna("")
            .astype(str)
            .mask(table["budget"].notna() & table["budget_bytes"].isna(), "no limit"),
            "what it is": table["role"],
            "task": table["task"].fillna(""),
            "prompt tokens": table["prompt_tokens"].astype("Int64"),
            "steps": table["steps"].astype("Int64"),
            "peak on device": _bytes(table["peak_bytes"]),
            "full KV": _bytes(table["full_kv_bytes"]),
            "to device": _bytes(table["h2d_bytes"]),
            "duration (s)": table["duration_s"].round(1),
            "run": table["uid"],
        }
    )
    columns = {
        "status": st.column_config.TextColumn(width=90),
        "output": st.column_config.TextColumn(width=130),
        "method": st.column_config.TextColumn(width=115),
        "what it is": st.column_config.TextColumn(width=175),
        "KL there (nats)": st.column_config.NumberColumn(format="%.3g"),
    }
    event = st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        on_select="rerun",
        selection_mode="single-row",
        key=f"run_table_{'whole' if whole else 'folded'}",
        column_config=columns,
        height=min(560, 40 + 35 * len(shown)),
    )
    if any(one.words == UNREAD for one in found):
        st.caption("Outcomes that are not read yet are read at the next looks at this page.")
    rows = event["selection"]["rows"]
    return str(table["uid"].iloc[rows[0]]) if rows and rows[0] < len(table) else None


def _line(text: str | None) -> str:
    return "" if text is None else " ".join(text.split())


def run_details(table: pd.DataFrame, uid: str) -> None:
    """Why a run failed, its output in full, and the runs it belongs with."""
    row = table[table["uid"] == uid].iloc[0]
    if not pd.isna(row["error"]) and row["error"]:
        widgets.error(str(row["error"]))
    if not pd.isna(row["output_text"]) and row["output_text"]:
        st.caption("Fed, full KV's tokens" if row["forced"] else "Output")
        st.code(str(row["output_text"]), language=None, wrap_lines=True)
    if related := lensdata.related(table, uid):
        with st.container(horizontal=True):
            for label, other in related:
                st.page_link("pages/replay.py", label=label, icon=":material/link:", query_params=places.in_run(other))


def _bytes(values: pd.Series) -> list[str]:
    return ["" if pd.isna(value) else si_bytes(float(value)) for value in values]
