"""Fields that New run and Study share: named segments of the prompt, and arguments of the model's chat template."""

from __future__ import annotations

from typing import Any

import streamlit as st

from kvlens.runs.request import parse_chat_args

_HEIGHT = 80
"""pixels of a field: two lines"""


def segment_lines(key: str, several: bool = False) -> tuple[str, ...]:
    """Draw the field for segments. Return its lines, each NAME=MARKER or NAME=START:END. several: of several
    prompts."""
    text = st.text_area(
        "Segments (optional)",
        height=_HEIGHT,
        key=key,
        persist_state="session",
        placeholder="instruction=### Rules",
        help="Parts of the prompt that the page Spans counts apart, one per line: a name, =, and the first words of "
        "the part. A part ends where the next one begins. Two character numbers work too: documents=120:480."
        + (" A prompt without a named part is left out." if several else ""),
    )
    return _lines(text)


def template_arguments(key: str) -> tuple[dict[str, Any], str]:
    """Draw the field for arguments of the chat template. Return the arguments, and one sentence on what is wrong with
    them ('': nothing)."""
    text = st.text_area(
        "Template arguments (optional)",
        height=_HEIGHT,
        key=key,
        persist_state="session",
        placeholder="enable_thinking=false",
        help="Arguments of the model's chat template, one per line: a name, =, and a value.",
    )
    try:
        return parse_chat_args(list(_lines(text))), ""
    except ValueError as problem:
        return {}, str(problem)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())
