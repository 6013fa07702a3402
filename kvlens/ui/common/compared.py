"""The way from chosen runs to the page that lays them side by side."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

MOST = 8
"""runs that are compared at once"""


def compare_link(uids: Sequence[str]) -> None:
    """A link to Compare with these runs, the first MOST; nothing for fewer than two."""
    if len(uids) < 2:
        return
    some = list(uids)[:MOST]
    params = {"run": some[0], "cmp": some[1]} if len(some) == 2 else {"runs": ",".join(some)}
    label = "Compare" if len(uids) <= MOST else f"Compare the first {MOST}"
    st.page_link("pages/compare.py", label=label, icon=":material/compare:", query_params=params)
