"""The table of runs."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.text.units import si_bytes
from kvlens.ui.common import lensdata, places, widgets


def run_table(table: pd.DataFrame) -> str | None:
    """Draws the runs and returns the uid of the selected row."""
    shown = pd.DataFrame(
        {
            "created (UTC)": table["created"].astype(str).str[:19].str.replace("T", " "),
            "status": table["status"],
            "what it is": lensdata.roles(table),
            "model": table["model"].fillna(""),
            "method": table["method"].fillna(""),
            "preset": table["preset"].fillna(""),
            "budget": table["budget"]
            .fillna("")
            .astype(str)
            .mask(table["budget"].notna() & table["budget_bytes"].isna(), "no limit"),
            "task": table["task"].fillna(""),
            "prompt tokens": table["prompt_tokens"].astype("Int64"),
            "steps": table["steps"].astype("Int64"),
            "peak on device": _bytes(table["peak_bytes"]),
            "full KV": _bytes(table["full_kv_bytes"]),
            "to device": _bytes(table["h2d_bytes"]),
            "duration (s)": table["duration_s"].round(1),
            "output": table["output_text"].fillna(""),
            "run": table["uid"],
        }
    )
    columns = {
        "output": st.column_config.TextColumn(width="medium"),
        "method": st.column_config.TextColumn(width=115),
        "what it is": st.column_config.TextColumn(width=175),
    }
    event = st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        on_select="rerun",
        selection_mode="single-row",
        key="run_table",
        column_config=columns,
        height=min(560, 40 + 35 * len(shown)),
    )
    rows = event["selection"]["rows"]
    return str(table["uid"].iloc[rows[0]]) if rows and rows[0] < len(table) else None


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
