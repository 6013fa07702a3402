"""What was clicked in a chart."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import session


def clicked(key: str) -> list[int]:
    """customdata of the point that was clicked; empty when none was, or when it is not whole numbers."""
    state = st.session_state.get(key)
    points = state["selection"]["points"] if state else []
    label = points[0].get("customdata") if points else None
    items = label if isinstance(label, list) else [label]
    return [int(item) for item in items if isinstance(item, (int, float)) and item >= 0]


def cell_clicked(key: str, group: int = 1) -> None:
    """A click on the map drawn under `key` selects its head on every page; of a map of KV heads, the first of `group`
    query heads."""
    if len(cell := clicked(key)) == 2:
        session.change({"layer": cell[0], "head": cell[1] * group})
