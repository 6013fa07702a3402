"""What a run will need, before it is started."""

from __future__ import annotations

from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.runs.preflight import estimate
from kvlens.text.prompts import PromptText
from kvlens.text.units import si_bytes
from kvlens.ui.common import widgets
from kvlens.ui.common.request import MethodChoice, PromptChoice

WANTED = "form_preset_wanted"
"""key of the session: (method, preset) that a button asked for"""


def budget_key(keeps_all: bool) -> str:
    """Key of the budget's field: a method whose KV all stays on the device has one of its own, no limit."""
    return "form_budget_all" if keeps_all else "form_budget"


@st.cache_data(max_entries=64, show_spinner="Estimating…")
def estimated(
    prompt: PromptText,
    model: str,
    method: str,
    preset: str | None,
    changed: dict[str, Any],
    budget: str,
    max_new: int,
    chat: str,
    system: str | None,
    question: str,
) -> dict[str, Any]:
    return estimate(prompt, model, method, changed, budget, max_new, preset, chat, system, question)


def panel(prompt: PromptChoice, choice: MethodChoice) -> bool:
    """Draws the estimate; True when the run can be started."""
    try:
        found = estimated(
            prompt.prompt,
            choice.model,
            choice.method,
            choice.preset,
            choice.changed,
            choice.budget,
            choice.max_new,
            choice.chat,
            choice.system,
            choice.question,
        )
    except (ValueError, OSError, KeyError) as problem:
        widgets.error(str(problem))
        return False
    with st.container(border=True):
        st.caption("Estimate before the run (not measured)")
        columns = st.columns(5)
        facts = (
            ("Prompt", _tokens(found["prompt_tokens"])),
            ("Full KV at the end", _bytes(found["full_kv_bytes"])),
            ("Budget", _limit(found)),
            ("Least this method needs", _bytes(found["min_budget_bytes"])),
            ("Trace on disk", _bytes(found["trace_bytes"])),
        )
        for column, (label, value) in zip(columns, facts, strict=True):
            column.metric(label, value)
        if (every := found["oracle_every"]) is not None:
            steps = "every step" if every == 1 else f"one step in {every}"
            st.caption(f"Full attention by span, over the exact keys, will be recorded at {steps} in all layers.")
        if found["fit"]:
            st.info(widgets.plain(found["fit"]))
        for warning in found["warnings"]:
            st.warning(widgets.plain(warning))
        if found["instead"]:
            _instead(found["instead"], choice)
    return found["feasible"] is not False


def _instead(found: dict[str, str], choice: MethodChoice) -> None:
    """A button that sets the form to what would work."""
    preset, budget = found.get("preset"), found.get("budget")
    words = [f"preset {preset}"] if preset else []
    words += [f"a budget of {_percent(budget)}"] if budget else []
    st.button(
        f"Use {' and '.join(words)}",
        icon=":material/build:",
        on_click=_set,
        args=(choice.method, preset, budget and _percent(budget)),
    )


def _set(method: str, preset: str | None, budget: str | None) -> None:
    if preset:
        st.session_state[WANTED] = (method, preset)
    if budget:
        st.session_state[budget_key(methods.get(method).keeps_all)] = budget


def _percent(budget: str) -> str:
    return budget if budget.endswith("%") else f"{float(budget) * 100:.1f}%"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else si_bytes(count)


def _tokens(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} tokens"


def _limit(found: dict[str, Any]) -> str:
    """The budget in bytes. Without full KV bytes nothing is known; with them, None means no limit."""
    if found["full_kv_bytes"] is None:
        return "unknown"
    return "no limit" if found["budget_bytes"] is None else si_bytes(found["budget_bytes"])
