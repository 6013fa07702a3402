"""What races against the chosen method on the prompt of the form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.request import MethodChoice, Rivals
from kvlens.app.ui.common.widgets import error
from kvlens.methods.naming import preset_name
from kvlens.runs.races import MOST
from kvlens.runs.request import DEFAULT_SHARE, default_preset

_NO_PARAMETER = "no"


def rivals_form(catalogue: list[dict[str, Any]], choice: MethodChoice) -> tuple[Rivals, MethodChoice]:
    """Draws the fields -> what races against the chosen method, nothing for an ordinary run; and the choice with the
    budget that all are held to."""
    names = [entry["name"] for entry in catalogue if entry["name"] != methods.REFERENCE]
    labels = {name: preset_name(name, default_preset(name, choice.model)) for name in names}
    picked = st.multiselect(
        "Race against",
        [name for name in labels if name != choice.method],
        key="form_rivals",
        persist_state="session",
        format_func=labels.__getitem__,
        max_selections=MOST - 1,
        placeholder="Other methods: all decode together on this prompt, each beside full KV",
        help="The prompt is read once, and every method has the same budget. A method that keeps all KV on the device "
        "attends that share of its tokens. The methods that you add here run with their default parameters.",
    )
    rivals = Rivals(tuple(picked), _variants(catalogue, choice, MOST - 1 - len(picked)))
    if not rivals.count or not methods.get(choice.method).keeps_all:
        return rivals, choice
    budget = st.text_input(
        sentences.RACE_BUDGET,
        f"{float(DEFAULT_SHARE):.0%}",
        key="form_budget",
        persist_state="session",
        help="What every method is held to: a share of full KV (10%), tokens (512tok) or bytes (64MB).",
    )
    return rivals, replace(choice, budget=str(budget).strip())


def _variants(catalogue: list[dict[str, Any]], choice: MethodChoice, most: int) -> tuple[tuple[str, str], ...]:
    """Draws a parameter of the chosen method and further values of it -> one (parameter, value) for each lane."""
    parameters = [p["name"] for entry in catalogue if entry["name"] == choice.method for p in entry["parameters"]]
    if choice.method == methods.REFERENCE or not parameters:
        return ()
    left_column, right = st.columns([2, 3])
    name = left_column.selectbox(
        "Race it against itself",
        [_NO_PARAMETER, *parameters],
        key=f"form_varied_{choice.method}",
        persist_state="session",
        format_func=lambda name: "no" if name == _NO_PARAMETER else f"with other values of {name}",
    )
    if name == _NO_PARAMETER:
        return ()
    text = right.text_input(
        f"Other values of {name}, with commas between them",
        key=f"form_values_{choice.method}_{name}",
        persist_state="session",
        placeholder="0.7, 0.9",
        help="Each value is a lane of its own, beside the value chosen above.",
    )
    typed = [value.strip() for value in text.split(",") if value.strip()]
    try:
        kind = methods.get(choice.method)
        lanes: dict[Any, str] = {}
        for value in typed:
            lanes.setdefault(methods.converted(kind, {name: value})[name], value)
    except ValueError as problem:
        error(str(problem))
        return ()
    values = list(lanes.values())
    if len(values) > most:
        error(f"A race has at most {MOST} methods: {len(values) - most} of the values are left out.")
    return tuple((name, value) for value in values[:most])
