"""Fields that New run and Study share: named segments of the prompt, arguments of the model's chat template, and what
becomes of a conversation's turns."""

from __future__ import annotations

from typing import Any

import streamlit as st

from kvlens.runs.request import parse_chat_args
from kvlens.text.carried import CHOICES, parse_turns
from kvlens.text.glossary import meaning

_HEIGHT = 80
"""pixels of a field: two lines"""


def segment_lines(key: str, several: bool = False) -> tuple[str, ...]:
    """Draw the field for segments. Return its lines, each NAME=MARKER or NAME=START:END. several: of several
    prompts."""
    text = _folded(
        "Segments (optional)",
        key,
        "instruction=### Rules",
        "Parts of the prompt that the page Spans counts apart, one per line: a name, =, and the first words of "
        "the part. A part ends where the next one begins. Two character numbers work too: documents=120:480."
        + (" A prompt without a named part is left out." if several else ""),
    )
    return _lines(text)


def template_arguments(key: str) -> tuple[dict[str, Any], str]:
    """Draw the field for arguments of the chat template. Return the arguments, and one sentence on what is wrong with
    them ('': nothing)."""
    text = _folded(
        "Template arguments (optional)",
        key,
        "enable_thinking=false",
        "Arguments of the model's chat template, one per line: a name, =, and a value.",
    )
    try:
        return parse_chat_args(list(_lines(text))), ""
    except ValueError as problem:
        return {}, str(problem)


def turns_are_carried(key: str) -> bool:
    """Draw the choice between carried turns and turns anew. Return True for carried."""
    choice = st.radio("Turns", CHOICES, key=key, persist_state="session", horizontal=True, help=meaning("turns"))
    return parse_turns(choice)


def _folded(label: str, key: str, example: str, about: str) -> str:
    """Draw a field of lines below its label, open once it holds something. Return its text."""
    with st.expander(label, expanded=bool(st.session_state.get(key))):
        return st.text_area(
            "One per line", height=_HEIGHT, key=key, persist_state="session", placeholder=example, help=about
        )


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())
