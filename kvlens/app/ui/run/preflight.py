"""What a run will need, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from kvlens import methods
from kvlens.app.ui.common import data, widgets
from kvlens.app.ui.common.likely import PLACING, Likely, likely
from kvlens.app.ui.common.readahead import finished_phases
from kvlens.app.ui.common.request import MethodChoice, PromptChoice
from kvlens.budget import NO_LIMIT, in_words
from kvlens.lens.condition import ANEW, CARRIED, asked_condition
from kvlens.lens.knob import asked_limit
from kvlens.runs.preflight import estimate
from kvlens.runs.request import AUTO
from kvlens.text.prompts import PromptText
from kvlens.text.units import counted, duration, si_bytes

WANTED = "form_preset_wanted"
"""key of the session: (method, preset) that a button asked for"""

PARTS = {
    "load": "loading the model",
    "prefill": "reading the prompt",
    "check": "budget check",
    "reference": "full-KV reference",
    "surprisal": "surprisals",
    "place": PLACING,
}
"""phases of a run, as the estimate names them"""
LEAST_S = 0.05
"""seconds below which a phase is not named"""


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
    budget: str | None,
    max_new: int,
    form: dict[str, Any],
) -> dict[str, Any]:
    return estimate(prompt, model, method, changed, budget, max_new, preset, **form)


def prompt_tokens(prompt: PromptChoice, choice: MethodChoice) -> int | None:
    """Return the tokens of a prompt whose estimate was drawn; None where they are not known."""
    tokens: int | None = _figures(prompt, choice)["prompt_tokens"]
    return tokens


def _figures(prompt: PromptChoice, choice: MethodChoice) -> dict[str, Any]:
    """Raises ValueError, OSError, KeyError for what is wrong with the run."""
    arguments = prompt.prompt, choice.model, choice.method, choice.preset, choice.changed, choice.budget, choice.max_new
    figures: dict[str, Any] = estimated(*arguments, choice.form)
    return figures


def panel(prompt: PromptChoice, choice: MethodChoice, head: DeltaGenerator) -> bool:
    """Draws the estimate, and the run's condition into the page's head; True when the run can be started."""
    try:
        figures = _figures(prompt, choice)
    except (ValueError, OSError, KeyError) as problem:
        widgets.error(str(problem))
        return False
    like = likely_of(choice.model, choice.method, figures, choice.against)
    if like is not None:
        like = like.after(finished_phases(prompt, choice))
    exact = methods.get(choice.method).floor_is_exact
    limit = limit_of(choice.method, choice.budget, figures)
    with head:
        widgets.condition_line(condition_of(prompt, choice, figures["prompt_tokens"], [limit]))
    with st.container(border=True):
        st.caption("Estimate before the run (not measured)")
        columns = st.columns(5)
        facts = (
            ("Prompt", _tokens(figures["prompt_tokens"])),
            ("Full KV at the end", _bytes(figures["full_kv_bytes"])),
            ("Budget", budget_phrase(figures)),
            ("Least this method needs" if exact else "It needs, by estimate", _bytes(figures["min_budget_bytes"])),
            ("Trace on disk", _bytes(figures["trace_bytes"] if like is None else like.trace_bytes)),
        )
        for column, (label, value) in zip(columns, facts, strict=True):
            column.metric(label, value)
        if figures["feasible"] is not False:
            if (kept_tokens := figures["prompt_kept"]) is not None:
                st.caption(kept_sentence(kept_tokens, figures["prompt_tokens"], figures["steps"]))
            st.caption(widgets.plain(took(like, figures)))
        if (every := figures["oracle_every"]) is not None:
            steps = "every step" if every == 1 else f"one step in {every}"
            st.caption(f"Full attention by span, over the exact keys, will be recorded at {steps} in all layers.")
        if figures["room"]:
            st.info(widgets.page_sentence(figures["room"]))
        if figures["fit"]:
            st.info(widgets.page_sentence(figures["fit"]))
        for warning in figures["warnings"]:
            st.warning(widgets.page_sentence(warning))
        if figures["instead"]:
            _instead(figures["instead"], choice)
    return figures["feasible"] is not False


def kept_sentence(kept_tokens: int, prompt_tokens: int, steps: int) -> str:
    """Say how much of the prompt fits beside the KV reserved for the steps of a run."""
    share = f"{kept_tokens / prompt_tokens:.1%}"
    sentence = f"A KV head keeps at most {kept_tokens:,} of the prompt's {prompt_tokens:,} tokens on average ({share})"
    return f"{sentence}; the KV of {counted(steps, 'new token')} is reserved."


def condition_of(prompt: PromptChoice, choice: MethodChoice, tokens: int | None, limits: Sequence[str]) -> str:
    """Return the condition of what the form asks for. limits: what each run is held to."""
    turns = "" if not choice.turns else CARRIED if choice.carried else ANEW
    return asked_condition(choice.model, tokens, choice.question, limits, turns, prompt.states_question)


def likely_of(model: str, method: str, figures: dict[str, Any], against: bool = False) -> Likely | None:
    """What stored runs of the model say of the run that `figures` estimates. against: compared with full KV."""
    if figures["prompt_tokens"] is None:
        return None
    return _likely(
        str(data.runs_dir()), model, method, figures["prompt_tokens"], figures["steps"], figures["step_bytes"], against
    )


@st.cache_data(max_entries=64, ttl=30, show_spinner=False)
def _likely(
    folder: str, model: str, method: str, tokens: int, steps: int, step_bytes: int, against: bool
) -> Likely | None:
    return likely(Path(folder), model, method, tokens, steps, step_bytes, against)


def took(like: Likely | None, figures: dict[str, Any]) -> str:
    """How long it will take, in words."""
    if like is None:
        return "The first run of this model here shows how long a run takes."
    words = PARTS | {"decode": f"at most {counted(figures['steps'], 'step')}"}
    parts = [
        f"{duration(seconds * 1e6)} {words[phase]}"
        for phase, seconds in like.phases.items()
        if phase != "effect" and seconds >= LEAST_S
    ]
    methods_phrase = "of this method" if like.same_method else "of other methods"
    runs = "the newest run" if like.runs == 1 else f"the newest {like.runs} runs"
    effect_s = like.phases.get("effect")
    lost = (
        "" if effect_s is None else f" If the answer is lost, finding the causes takes {duration(effect_s * 1e6)} more."
    )
    missing = [words[phase] for phase in ("load", "prefill") if phase not in like.phases.keys() | like.finished]
    unknown = f" Not known yet: {' and '.join(missing)}." if missing else ""
    answered = " and answered by full KV" if "reference" in like.finished else ""
    finished = f" The prompt has been read{answered} already." if like.finished else ""
    return (
        f"Time: about {duration(like.total_s * 1e6)}: {', '.join(parts)}. By {runs} {methods_phrase} on this model "
        f"here.{lost}{unknown}{finished}"
    )


def _instead(remedy: dict[str, str], choice: MethodChoice) -> None:
    """A button that sets the form to what would work."""
    preset, budget = remedy.get("preset"), remedy.get("budget")
    words = [f"preset {preset}"] if preset else []
    words += [limit if (limit := in_words(budget)) == NO_LIMIT else f"a budget of {_percent(budget)}"] if budget else []
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


def limit_of(method: str, budget: str | None, figures: dict[str, Any]) -> str:
    """What a run is held to, by its estimate: the budget that `auto` stands for, where it is known."""
    limit, full = figures["budget_bytes"], figures["full_kv_bytes"]
    if budget == AUTO and full:
        budget = None if limit is None else f"{100 * limit / full:.1f}%"
    return asked_limit(method, figures["config"] or {}, budget)


def budget_phrase(figures: dict[str, Any]) -> str:
    """The budget in bytes. Without full KV bytes nothing is known; with them, None means no limit."""
    if figures["full_kv_bytes"] is None:
        return "unknown"
    return NO_LIMIT if figures["budget_bytes"] is None else si_bytes(figures["budget_bytes"])
