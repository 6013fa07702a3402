"""Which model, in which form it is fed, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from kvlens.app.ui.common.promptfields import template_arguments
from kvlens.app.ui.common.widgets import plain
from kvlens.models.catalogue import label
from kvlens.models.device import expected
from kvlens.text.chat import CHOICES
from kvlens.text.prompts import QUESTIONS

_CHAT = {
    "auto": "auto: chat form where the model has one",
    "on": "on: the model's chat form",
    "off": "off: the text as it is",
}
_QUESTION = {
    "in": "in: the method sees it with the context",
    "after": "after: the method places the context before it sees the question",
}


@dataclass(frozen=True)
class ModelChoice:
    """A model, and how the prompt is fed to it. system: None for the template's own."""

    model: str
    chat: str = "auto"
    system: str | None = None
    question: str = "in"
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """one sentence on what cannot be read of the fields; '': nothing"""


def model_form(models: list[str]) -> ModelChoice:
    """Draws the fields and returns what they say. `models`: names to offer besides any the user types."""
    model = st.selectbox(
        "Model",
        models,
        key="form_model",
        accept_new_options=True,
        persist_state="session",
        format_func=label,
        help="Choose a name, or type the path of a model's folder or .gguf file. A hub id works if its files are on "
        "this machine.",
    )
    left_column, right = st.columns(2)
    chat = left_column.selectbox(
        "Chat form", CHOICES, key="form_chat", persist_state="session", format_func=_CHAT.__getitem__
    )
    system = right.text_input(
        "System message (optional)", key="form_system", persist_state="session", help="Empty: the chat template's own."
    )
    arguments, problem = template_arguments("form_chat_args")
    question = st.radio(
        "Question",
        QUESTIONS,
        key="form_question",
        persist_state="session",
        horizontal=True,
        format_func=_QUESTION.__getitem__,
        help="A method that sees the question can keep what the question needs. A method that does not see it must "
        "keep what any question may need.",
    )
    st.caption(plain(f"It will run on: {expected()} (auto: CUDA where there is one)."))
    return ModelChoice(str(model), str(chat), system.strip() or None, str(question), arguments, problem)
