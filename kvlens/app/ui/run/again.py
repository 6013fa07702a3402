"""The form filled from a stored run (?like=): the same prompt, for another method or parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import data, widgets
from kvlens.app.ui.common.again import PARAMETER
from kvlens.app.ui.common.request import PromptChoice, as_typed
from kvlens.app.ui.run.preflight import WANTED, budget_key
from kvlens.app.ui.run.upload import put_file
from kvlens.methods import FIT
from kvlens.methods.fitting import parts_as_run
from kvlens.models.find import default_model
from kvlens.runs.request import AUTO, default_preset
from kvlens.runs.storedprompt import stored_prompt
from kvlens.store.reader import TraceError, TraceReader

_VALUES = "form_values_of_run"
"""key of the session: the parameters that the form begins with"""


@dataclass(frozen=True)
class StartValues:
    """Parameters of a stored run, which the form begins with instead of the preset's."""

    run: str
    method: str
    preset: str | None
    values: dict[str, Any]

    def read(self, method: str, preset: str) -> dict[str, Any]:
        """Return the values for the form of a method and preset; {} for another one than the run's."""
        return self.values if (method, preset) == (self.method, self.preset) else {}


def start_values() -> StartValues:
    """Return what the form begins with."""
    stored: StartValues | None = st.session_state.get(_VALUES)
    return stored or StartValues("", "", None, {})


def fill_form() -> None:
    """Fill the form from the run in the URL, once: the URL then forgets the run."""
    uid = st.query_params.get(PARAMETER)
    if uid is None:
        return
    del st.query_params[PARAMETER]
    try:
        with TraceReader.open(data.runs_dir(), uid) as reader:
            meta, text = reader.meta, reader.prompt_text()
        if not text:
            widgets.error(f"The prompt of run {uid} was not stored with it: upload or paste the prompt.")
            return
        method = str(meta.method) if meta.is_steered else methods.DEFAULT
        kind = methods.get(method)
        overrides = methods.converted(kind, dict((meta.request or {}).get("overrides") or {}))
    except (TraceError, ValueError) as problem:
        widgets.error(str(problem))
        return
    request = meta.request or {}
    turns = tuple((str(role), str(words)) for role, words in request.get("turns") or ())
    put_file(f"prompt of {uid}.json", PromptChoice(stored_prompt(meta, text), uid, turns).file_text().encode())
    model = str(meta.model) if meta.is_steered else default_model()
    usual = default_preset(method, model)
    preset = request.get("preset") or meta.preset or usual
    if preset == FIT:
        overrides = parts_as_run(kind, usual, meta.config) | overrides
    budget = str(request.get("budget") or AUTO)
    fields = {
        "form_source": "Upload",
        "form_model": model,
        "form_chat": request.get("chat") or "auto",
        "form_system": request.get("system") or "",
        "form_question": request.get("question") or "in",
        "form_chat_args": "\n".join(as_typed(*pair) for pair in dict(request.get("chat_args") or {}).items()),
        "form_segments": "",
        "form_turns": "carried" if request.get("carried") else "anew",
        "form_method": method,
        budget_key(kind.keeps_all): budget,
        "form_max_new": int(request.get("max_new") or 64),
        "form_seed": int(meta.seed or 0),
    }
    for key, value in fields.items():
        st.session_state[key] = value
    if preset is not None:
        st.session_state[WANTED] = (method, preset)
    st.session_state[_VALUES] = StartValues(uid, method, preset, overrides)
