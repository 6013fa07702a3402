"""A button that exports a table of many runs at once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.widgets import error, guarded
from kvlens.store.errors import TraceError
from kvlens.store.export import FORMATS
from kvlens.tables.manyruns import TABLES, export_runs
from kvlens.text.units import counted

MIME = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet", "json": "application/json"}


@st.fragment
def export_menu(uids: Sequence[str], stem: str) -> None:
    """Draw the menu. The file is made when its button is pressed. stem: names the file and the menu."""
    if not uids:
        return
    label = f"Export {counted(len(uids), 'run')}"
    with st.popover(label, icon=":material/download:", key=f"export_{stem}"):
        guarded(lambda: _choices(uids, stem))()


def _choices(uids: Sequence[str], stem: str) -> None:
    table = str(st.selectbox("Table", TABLES, index=TABLES.index("steps"), key=f"export_table_{stem}"))
    fmt = str(st.segmented_control("Format", FORMATS, default="csv", key=f"export_format_{stem}", required=True))
    st.caption(
        "One row of the table per line. The first columns name its run: model, method, every parameter, "
        "budget, task, prompt, question, seed, outcome."
    )
    if not st.button("Make the file", key=f"export_make_{stem}"):
        return
    try:
        content = table_file(uids, data.runs_dir(), table, fmt)
    except (TraceError, ValueError) as problem:
        error(str(problem))
        return
    st.download_button(
        f"Save {table}.{fmt}",
        content,
        f"{stem}-{table}.{fmt}",
        MIME[fmt],
        key=f"export_save_{stem}",
        on_click="ignore",
        type="primary",
        icon=":material/download:",
    )


def table_file(uids: Sequence[str], runs_dir: Path, table: str, fmt: str) -> bytes:
    """Return a table of runs as a file of 'csv', 'parquet' or 'json', with the columns of its run in each row."""
    out = io.BytesIO()
    export_runs(uids, runs_dir, table, fmt, out, with_run=True)
    return out.getvalue()
