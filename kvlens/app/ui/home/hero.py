"""What a visitor sees first: the name, one sentence, one button, and a loss with its repair as a moving picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from kvlens.app.gallery.story import story
from kvlens.app.ui.common.widgets import plain
from kvlens.methods.naming import preset_name
from kvlens.player.script import joined
from kvlens.rows import SPAN_STATES
from kvlens.text.units import si_bytes
from kvlens.text.words import STATES

_FOLDER = Path(__file__).parent
SENTENCE = (
    "See which part of a prompt a KV-cache method lost, which head missed it, and why the cache did not hold it. Then "
    "hold it and see whether that brings the answer back."
)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


_picture = st.components.v2.component(
    "kvlens_story", html=_read("story.html"), css=_read("story.css"), js=joined(_FOLDER / "story.js")
)


def hero(buttons: Callable[[], None]) -> None:
    """Draws the head of the first page. buttons: what stands below the sentence."""
    words, picture = st.columns([5, 6], gap="large", vertical_alignment="center")
    with words:
        st.title("kvlens", anchor=False)
        st.markdown(f"##### {plain(SENTENCE)}")
        buttons()
    with picture:
        moving_picture()


def moving_picture() -> None:
    """A recorded loss and its repair, played in the page from the gallery's story."""
    recorded_story = story()
    data = recorded_story.model_dump(exclude={"method", "held_bytes", "uid"})
    data |= {
        "method": preset_name(recorded_story.method, None),
        "cost": si_bytes(recorded_story.held_bytes),
        "states": [STATES[state] for state in SPAN_STATES],
    }
    _picture(key="story", data=data)
