"""What is told of each run of the list, for all sessions of this server: read once per run, while somebody looks."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data
from kvlens.lens.listing import ListedRun, listing_of

LOOK_S = 1.0
"""how long one look at the table may read traces that were not read before"""
UNREAD = "not read yet"


def read_listed(table: pd.DataFrame) -> list[ListedRun | None]:
    """In the order of the table. None: not read yet; see `go_on`."""
    return listing_of(data.runs_dir()).read(list(map(str, table["uid"])), LOOK_S)


@st.fragment(run_every=0.5)
def go_on(uids: list[str]) -> None:
    """Reads these runs behind the page, which is drawn again when it has."""
    remaining = listing_of(data.runs_dir()).read(uids, LOOK_S).count(None)
    if not remaining:
        st.rerun()
    st.caption(f"The outcomes of {remaining} runs are still being read.")
