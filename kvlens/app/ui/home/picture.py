"""What a first visitor is shown of what a run opens."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path

import streamlit as st


def picture() -> None:
    """The Replay of a lost answer, as a picture."""
    st.image(_inline("replay.png"), caption="What opens: the Replay of a lost answer", width=760)


@cache
def _inline(file: str) -> str:
    """A picture as part of the page. As a file of Streamlit's it is gone once the page is left, and a browser that asks
    for it then reports an error."""
    return "data:image/png;base64," + base64.b64encode(Path(__file__).with_name(file).read_bytes()).decode()
