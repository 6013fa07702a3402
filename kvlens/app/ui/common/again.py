"""The way from a stored run to the form with the same prompt."""

from __future__ import annotations

import streamlit as st

PARAMETER = "like"
"""of the New run page's URL: the run whose prompt and settings the form takes"""


def again_link(uid: str) -> None:
    """A link to the form, filled with a run's prompt and settings."""
    st.page_link(
        "pages/run.py",
        label="Same prompt, another method or parameter",
        icon=":material/tune:",
        query_params={PARAMETER: uid},
    )
