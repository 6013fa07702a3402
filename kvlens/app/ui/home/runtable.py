"""The table of runs: a click opens one, ticks choose several."""

from __future__ import annotations

import hashlib

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data, places
from kvlens.app.ui.home.reading import UNREAD
from kvlens.lens.listing import ListedRun, differences_in, limit_in
from kvlens.lens.outcomelabel import outcome_label
from kvlens.lens.severity import KL_THERE, MARGIN_THERE
from kvlens.models.find import short_model
from kvlens.text.units import si_bytes

AT_ONCE = "The run shared its decode steps with other prompts. Its duration is not that of a run alone."
ROW, HEAD, MOST = 35, 40, 560
"""heights in pixels"""


def shown_runs(table: pd.DataFrame, listed_runs: list[ListedRun | None]) -> pd.DataFrame:
    """What is shown of each run, in the order of the table. Names, tags, notes and prompts at once have columns
    where there are any."""
    rows = table.to_dict("records")
    differences = differences_in(rows, listed_runs)
    came = [None if item is None else item.outcome for item in listed_runs]
    shown = pd.DataFrame(
        {
            "name": table["name"],
            "created (UTC)": table["created"].astype(str).str[:19].str.replace("T", " "),
            "method": [f"{data.row_title(row)} {words}".strip() for row, words in zip(rows, differences, strict=True)],
            "held to": [limit_in(row, item) for row, item in zip(rows, listed_runs, strict=True)],
            "KV in": table["dtype"].fillna(""),
            "outcome": [UNREAD if item is None else outcome_label(item.words, item.kinds) for item in came],
            "expected": ["" if item is None else _line(item.expected) for item in came],
            "output": table["output_text"].fillna(""),
            "left full KV at step": pd.array([None if item is None else item.lost_at for item in came], "Int64"),
            "KL there (nats)": pd.array([None if item is None else item.kl for item in came], "Float64"),
            "logits apart there": pd.array([None if item is None else item.margin for item in came], "Float64"),
            "tags": [list(tags) for tags in table["tags"]],
            "note": table["note"].map(_line),
            "model": table["model"].fillna("").map(short_model),
            "preset": table["preset"].fillna(""),
            "status": table["status"],
            "what it is": table["role"],
            "task": table["task"].fillna(""),
            "prompt tokens": table["prompt_tokens"].astype("Int64"),
            "steps": table["steps"].astype("Int64"),
            "peak on device": _bytes(table["peak_bytes"]),
            "full KV": _bytes(table["full_kv_bytes"]),
            "to device": _bytes(table["h2d_bytes"]),
            "duration (s)": table["duration_s"].round(1),
            "prompts at once": table["batched"].astype("Int64"),
            "run": table["uid"],
        }
    )
    unused = [name for name in ("name", "tags", "note") if not shown[name].map(len).any()]
    return shown.drop(columns=[*unused, *([] if table["batched"].notna().any() else ["prompts at once"])])


def run_table(table: pd.DataFrame, listed_runs: list[ListedRun | None], without: tuple[str, ...] = ()) -> list[str]:
    """Draws runs and returns those that are ticked; a click on a run opens it. `without`: columns that are left out."""
    shown = shown_runs(table, listed_runs).drop(columns=list(without), errors="ignore")
    uids = list(map(str, table["uid"]))
    event = st.dataframe(
        shown,
        hide_index=True,
        width="stretch",
        on_select="rerun",
        selection_mode=["multi-row", "single-cell"],
        key=table_key(uids),
        column_config={
            "status": st.column_config.TextColumn(width=90),
            "output": st.column_config.TextColumn(width=130),
            "method": st.column_config.TextColumn(width=115),
            "held to": st.column_config.TextColumn(width=155),
            "what it is": st.column_config.TextColumn(width=175),
            "KL there (nats)": st.column_config.NumberColumn(format="%.3g", help=KL_THERE),
            "logits apart there": st.column_config.NumberColumn(format="%.3g", help=MARGIN_THERE),
            "prompts at once": st.column_config.NumberColumn(help=AT_ONCE),
        },
        height=min(MOST, HEAD + ROW * len(shown)),
        placeholder="",
    )
    cells = [int(row) for row, _ in event["selection"]["cells"]]
    if cells and cells[0] < len(uids):
        st.switch_page("pages/replay.py", query_params=places.in_run(uids[cells[0]]))
    return [uids[row] for row in event["selection"]["rows"] if row < len(uids)]


def table_key(uids: list[str]) -> str:
    """Names the table of these runs. Ticks are numbers of rows: a list of other runs begins without any."""
    return f"run_table_{hashlib.sha256(' '.join(uids).encode()).hexdigest()[:12]}"


def _line(text: str | None) -> str:
    return "" if text is None else " ".join(text.split())


def _bytes(values: pd.Series) -> list[str]:
    return ["" if pd.isna(value) else si_bytes(float(value)) for value in values]
