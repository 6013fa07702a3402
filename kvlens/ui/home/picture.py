"""What a first visitor is shown of what a run opens."""

from __future__ import annotations

import streamlit as st

from kvlens import REPOSITORY


def picture() -> None:
    """The Replay of a lost answer, as a picture."""
    st.image(str(REPOSITORY / "docs/replay.png"), caption="What opens: the Replay of a lost answer", width=760)
