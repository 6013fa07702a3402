"""The form for method, budget and the method's own parameters, made from the catalogue of methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, changed_parameters
from kvlens.app.ui.common.widgets import error, label, notice, plain
from kvlens.app.ui.run.again import start_values
from kvlens.app.ui.run.modelform import ModelChoice
from kvlens.app.ui.run.preflight import WANTED, budget_key, estimated
from kvlens.methods import FIT
from kvlens.methods.naming import installed, preset_name, refusal_of
from kvlens.runs.request import AUTO, DEFAULT_SHARE, default_preset

_METHOD, _COMPOSED = "form_method", "form_composed"
"""keys of the session: the chosen method and the composed name in the text field"""


def offered_methods(catalogue: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the catalogue with the composed methods that the form holds: the chosen one and the typed one."""
    listed = {entry["name"] for entry in catalogue}
    names = dict.fromkeys(str(st.session_state.get(key) or "").strip() for key in (_METHOD, _COMPOSED))
    return [*catalogue, *(methods.entry(name) for name in names if name not in listed and installed(name) is not None)]


def _composed_field() -> None:
    """Draw the field for a composed name, and why a name is refused."""
    name = st.text_input(
        "Composed method",
        key=_COMPOSED,
        persist_state="session",
        placeholder="PART:METHOD+STORAGE",
        on_change=_choose_composed,
        help=plain(
            "Joins parts of methods: PART:METHOD, METHOD+STORAGE or METHOD@TRIGGER. The Method list then offers it."
        ),
    ).strip()
    if name and (refusal := refusal_of(name)):
        error(refusal)


def _choose_composed() -> None:
    name = str(st.session_state[_COMPOSED]).strip()
    if installed(name) is not None:
        st.session_state[_METHOD] = name


def method_form(catalogue: list[dict[str, Any]], model: ModelChoice, prompt: PromptChoice | None) -> MethodChoice:
    """Draws the form and returns what it says. prompt: what it is to be run on, by whose length the preset `fit` is
    computed; None: not known yet."""
    names = [entry["name"] for entry in catalogue]
    titles = {e["name"]: preset_name(e["name"], default_preset(e["name"], model.model)) for e in catalogue}
    labels = {e["name"]: f"{titles[e['name']]} · {e['family'].replace('_', ' ')}" for e in catalogue}
    method = st.selectbox(
        "Method",
        names,
        index=names.index(methods.DEFAULT),
        key=_METHOD,
        persist_state="session",
        format_func=lambda name: labels[name],
    )
    _composed_field()
    notice([sentence.rstrip(".") for sentence in methods.refused().values()])
    entry = next(item for item in catalogue if item["name"] == method)
    st.caption(plain(f"{entry['title']} {entry['summary']}. {entry['paper']}."))
    left_column, middle, right = st.columns(3)
    keeps_all = bool(entry["keeps_all"])
    budget = left_column.text_input(
        "Budget",
        AUTO,
        key=budget_key(keeps_all),
        persist_state="session",
        help=(
            "Peak KV bytes on the device inside a step: a share of full KV (10%), tokens (512tok) or bytes "
            f"(64MB). 100%: no limit. {AUTO}: {float(DEFAULT_SHARE):.0%}, or the least that the method can hold for "
            "this prompt. For a method that keeps all KV, a share bounds the tokens it attends; "
            f"{AUTO} leaves them to its parameters."
        ),
    )
    max_new = middle.number_input("Max new tokens", 1, 4096, 64, key="form_max_new", persist_state="session")
    seed = right.number_input("Seed", 0, 2**31 - 1, 0, key="form_seed", persist_state="session")
    plain_choice = MethodChoice(
        method,
        model.model,
        None,
        str(budget).strip(),
        int(max_new),
        int(seed),
        chat=model.chat,
        system=model.system if prompt is None or prompt.system is None else prompt.system,
        question=model.question,
        chat_args=model.chat_args,
        turns=() if prompt is None else prompt.turns,
        carried=prompt is not None and prompt.carried,
    )
    typed = st.session_state.get(budget_key(False), AUTO)
    if keeps_all and typed != AUTO:
        st.caption(
            plain(
                f"{entry['title']} keeps all KV on the device, so it has a budget of its own. Other methods take "
                f"{typed}."
            )
        )
    preset, base = _preset(entry, plain_choice, prompt)
    values = _parameters(entry, preset, base)
    changed = changed_parameters(entry["parameters"], base, values)
    return replace(plain_choice, preset=preset, changed=changed, against=_against(method))


def _preset(entry: dict[str, Any], choice: MethodChoice, prompt: PromptChoice | None) -> tuple[str, dict[str, Any]]:
    """Draws the choice of a preset, which begins with the one that a run takes by itself -> (preset, its values over
    the defaults)."""
    usual = _foreseen(choice, prompt)
    start = usual.get("preset") or default_preset(choice.method, choice.model) or FIT
    key = f"form_preset_{choice.method}_{start}"
    if st.session_state.get(WANTED, ("", ""))[0] == choice.method:
        st.session_state[key] = st.session_state.pop(WANTED)[1]
    options = [*entry["presets"], FIT]
    preset = st.selectbox(
        "Preset",
        options,
        index=options.index(start),
        key=key,
        persist_state="session",
        format_func=lambda name: f"{FIT}: computed for this prompt and budget" if name == FIT else name,
        help=plain(f"{FIT}: {entry['fit']}"),
    )
    if preset != FIT:
        return preset, entry["presets"][preset]
    return preset, _foreseen(replace(choice, preset=FIT), prompt).get("values") or {}


def _foreseen(choice: MethodChoice, prompt: PromptChoice | None) -> dict[str, Any]:
    """What arithmetic says of a run; empty where it cannot be said, which the panel below the form tells."""
    if prompt is None:
        return {}
    try:
        return estimated(
            prompt.prompt, choice.model, choice.method, choice.preset, {}, choice.budget, choice.max_new, choice.form
        )
    except (ValueError, OSError, KeyError):
        return {}


def _against(method: str) -> bool:
    """Whether each step is to be compared with full KV, which has nothing to be compared with."""
    if method == methods.REFERENCE:
        return False
    return st.checkbox(
        "Record the loss against full KV",
        True,
        key="form_against",
        persist_state="session",
        help="Runs the prompt under full KV first, once for all methods, and stores that run. Every step then records "
        "how the method's next token differs from full KV's.",
    )


def _parameters(entry: dict[str, Any], preset: str, base: dict[str, Any]) -> dict[str, Any]:
    """One widget per parameter; keys carry the preset and its values, so that another preset starts from its own."""
    if not entry["parameters"]:
        st.caption("This method has no parameters of its own.")
        return {}
    values: dict[str, Any] = {}
    papers = entry["presets"].get("paper", {})
    run_values = start_values().read(entry["name"], preset)
    with st.expander(f"Parameters of {plain(entry['title'])} ({len(entry['parameters'])})"):
        st.caption("A dagger (†) marks a choice of ours where the paper is silent.")
        columns = st.columns(2)
        for index, parameter in enumerate(entry["parameters"]):
            name = parameter["name"]
            value, paper = base.get(name, parameter["default"]), papers.get(name, parameter["default"])
            beside = f" · paper's preset: {paper}" if preset == FIT and value != paper else ""
            key = f"param:{entry['name']}:{preset}:{name}" + (f":{value}" if preset == FIT else "")
            if name in run_values:
                value, key = run_values[name], f"{key}:{start_values().run}"
            with columns[index % 2]:
                values[name] = _widget(parameter, value, key, beside)
    return values


def _widget(parameter: dict[str, Any], value: Any, key: str, beside: str = "") -> Any:
    symbol = f" ({parameter['symbol']})" if parameter.get("symbol") else ""
    title = label(f"{parameter['name']}{symbol}{' †' if parameter.get('ours') else ''}{beside}")
    more: dict[str, Any] = {"key": key, "help": plain(parameter["doc"]) or None, "persist_state": "session"}
    kind = parameter["type"]
    if kind == "choice":
        options = list(parameter["choices"])
        return st.selectbox(title, options, index=options.index(value), **more)
    if kind == "bool":
        return st.checkbox(title, value, **more)
    if kind == "int":
        return int(st.number_input(title, value=int(value), step=1, **more))
    if kind == "float":
        return float(st.number_input(title, value=float(value), step=0.01, format="%.6g", **more))
    return st.text_input(title, str(value), **more)
