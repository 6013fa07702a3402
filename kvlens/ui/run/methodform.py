"""The form for model, method, budget and the method's own parameters, made from the catalogue of methods."""

from __future__ import annotations

from typing import Any

import streamlit as st

from kvlens import methods
from kvlens.ui.common.request import MethodChoice, changed_parameters
from kvlens.ui.common.widgets import plain
from kvlens.ui.run.modelform import model_form


def method_form(catalogue: list[dict[str, Any]], models: list[str]) -> MethodChoice:
    """Draws the form and returns what it says. `models`: names to offer besides any the user types."""
    chosen = model_form(models)
    model = chosen.model
    names = [entry["name"] for entry in catalogue]
    labels = {e["name"]: f"{e['title']} · {e['family'].replace('_', ' ')}" for e in catalogue}
    method = st.selectbox(
        "Method",
        names,
        index=names.index(methods.DEFAULT),
        key="form_method",
        persist_state="session",
        format_func=lambda name: labels[name],
    )
    entry = next(item for item in catalogue if item["name"] == method)
    st.caption(plain(f"{entry['title']} {entry['summary']}. {entry['paper']}."))
    presets = list(entry["presets"])
    preset = None
    if presets:
        start = "demo" if model == "demo" and "demo" in presets else presets[0]
        preset = st.selectbox(
            "Preset",
            presets,
            index=presets.index(start),
            key=f"form_preset_{method}_{model == 'demo'}",
            persist_state="session",
        )
    left, middle, right = st.columns(3)
    keeps_all = bool(
        entry["keeps_all"]
    )  # its KV all stays on the device, so it has a budget field of its own: no limit
    budget = left.text_input(
        "Budget",
        "100%" if keeps_all else "25%",
        key="form_budget_all" if keeps_all else "form_budget",
        persist_state="session",
        help=(
            "Peak KV bytes on the device inside a step: a share of full KV (10%), tokens (512tok) or bytes "
            "(64MB). 100%: no limit."
        ),
    )
    max_new = middle.number_input("Max new tokens", 1, 4096, 64, key="form_max_new", persist_state="session")
    seed = right.number_input("Seed", 0, 2**31 - 1, 0, key="form_seed", persist_state="session")
    values = _parameters(entry, preset)
    changed = changed_parameters(entry["parameters"], entry["presets"].get(preset or "", {}), values)
    against = _against(method)
    return MethodChoice(
        method,
        model,
        preset,
        str(budget).strip(),
        int(max_new),
        int(seed),
        changed,
        against,
        chosen.chat,
        chosen.system,
        chosen.question,
    )


def _against(method: str) -> bool:
    """Whether each step is to be compared with full KV, which has nothing to be compared with."""
    if method == methods.REFERENCE:
        return False
    return st.checkbox(
        "Record the loss against full KV",
        True,
        key="form_against",
        persist_state="session",
        help="Runs the prompt under full KV first, once for all methods, stores that as a run, and logs per "
        "step what the method's next "
        "token lost against it.",
    )


def _parameters(entry: dict[str, Any], preset: str | None) -> dict[str, Any]:
    """One widget per parameter; keys carry the preset, so that another preset starts from its own values."""
    if not entry["parameters"]:
        st.caption("This method has no parameters of its own.")
        return {}
    base = entry["presets"].get(preset or "", {})
    values: dict[str, Any] = {}
    with st.expander(f"Parameters of {plain(entry['title'])} ({len(entry['parameters'])})"):
        st.caption("A dagger (†) marks a choice of ours where the paper is silent.")
        columns = st.columns(2)
        for index, parameter in enumerate(entry["parameters"]):
            key = f"param:{entry['name']}:{preset}:{parameter['name']}"
            with columns[index % 2]:
                values[parameter["name"]] = _widget(parameter, base.get(parameter["name"], parameter["default"]), key)
    return values


def _widget(parameter: dict[str, Any], value: Any, key: str) -> Any:
    symbol = f" ({parameter['symbol']})" if parameter.get("symbol") else ""
    label = plain(f"{parameter['name']}{symbol}{' †' if parameter.get('ours') else ''}")
    more: dict[str, Any] = {"key": key, "help": plain(parameter["doc"]) or None, "persist_state": "session"}
    kind = parameter["type"]
    if kind == "choice":
        options = list(parameter["choices"])
        return st.selectbox(label, options, index=options.index(value), **more)
    if kind == "bool":
        return st.checkbox(label, value, **more)
    if kind == "int":
        return int(st.number_input(label, value=int(value), step=1, **more))
    if kind == "float":
        return float(st.number_input(label, value=float(value), step=0.01, format="%.6g", **more))
    return st.text_input(label, str(value), **more)
