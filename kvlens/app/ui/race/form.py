"""Which methods race on the prompt of the form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common.request import MethodChoice
from kvlens.methods.naming import preset_name
from kvlens.runs.races import MOST
from kvlens.runs.request import DEFAULT_SHARE, default_preset


def rivals(catalogue: list[dict[str, Any]], choice: MethodChoice) -> tuple[tuple[str, ...], MethodChoice]:
    """Draws the field -> the methods that race against the chosen one, none for an ordinary run; and the choice with
    the budget that all are held to."""
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
        help="The prompt is read once. Every method is held to the same budget; one that keeps all KV on the device is "
        "held to that share of the tokens it attends. Others than the one above run as they come.",
    )
    if not picked or not methods.get(choice.method).keeps_all:
        return tuple(picked), choice
    budget = st.text_input(
        "Budget of the race",
        f"{float(DEFAULT_SHARE):.0%}",
        key="form_budget",
        persist_state="session",
        help="What every method is held to: a share of full KV (10%), tokens (512tok) or bytes (64MB).",
    )
    return tuple(picked), replace(choice, budget=str(budget).strip())
