"""The stored studies, a line each."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data
from kvlens.app.ui.common.widgets import plain
from kvlens.studies.catalogue import studies_in
from kvlens.text.plaintext import visible

MOST = 20
"""studies that are listed"""


def study_list(shown: str | None) -> None:
    """Draw the list; `shown`: the study that the page shows already."""
    rows = [row for row in studies_in(data.runs_dir()) if row.id != shown][:MOST]
    if not rows:
        return
    st.markdown("##### Studies")
    for row in rows:
        title_column, count_column, link_column = st.columns([7, 2, 2], vertical_alignment="center")
        title_column.text(visible(f"{row.name or row.id}: {row.methods} on {row.model}, {row.prompts} prompts"))
        count_column.text(f"{row.ended:,} / {row.planned:,} trials" + (", running" if row.running else ""))
        with link_column:
            st.page_link(
                "pages/study.py", label=plain("Open"), icon=":material/table_chart:", query_params={"study": row.id}
            )
