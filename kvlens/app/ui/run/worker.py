"""The process that is kept for runs: whether it is there, what it holds, and a button that releases it."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common.warm import able, warm
from kvlens.cli.warm import idle_seconds
from kvlens.text.units import si_bytes

_KEY = "worker_release"


def worker_line() -> None:
    """Draw one line about the process; nothing where jobs start from nothing."""
    if not able():
        return
    status, minutes = warm.status(), f"{idle_seconds() / 60:.3g} minutes"
    if status is None:
        st.caption(f"No process is kept for runs. The first run starts one; it ends after {minutes} without a run.")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        state = "at work" if status.busy else "idle"
        st.caption(
            f"A process is kept for runs: {state}, {si_bytes(status.resident_bytes)} resident. It ends after {minutes} "
            "without a run.",
            width="content",
        )
        if not status.busy:
            st.button("Release its memory", key=_KEY, type="tertiary", on_click=warm.release)
