"""The head of every page that looks at a run: which run, what is selected, a link to exactly this view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data, sentences, session, widgets
from kvlens.app.ui.common.data import TraceError, TraceReader
from kvlens.app.ui.common.effectplace import follow_effects
from kvlens.app.ui.common.state import Selection
from kvlens.budget import phrase
from kvlens.lens.condition import condition
from kvlens.lens.listing import budget_of, differences_in, listing_of
from kvlens.methods.differences import DTYPE, QUESTION, SEED
from kvlens.methods.naming import run_name
from kvlens.models.find import short_model


def choose_run(title: str) -> tuple[TraceReader, Selection] | None:
    """Draws the head of the page and returns the run and the selection inside it; None when there is nothing to show,
    said on the page."""
    selection, problems = session.selection()
    table = data.runs()
    if table.empty:
        st.subheader(title)
        if selection.run is not None:
            widgets.error(f"There is no run {selection.run[:80]}; it was deleted, or is in another folder.")
        st.info(f"{sentences.NO_RUNS} Start one, then come back to look at it.")
        st.page_link("pages/run.py", label="Start a run", icon=":material/play_arrow:")
        return None
    uids = [str(uid) for uid in table["uid"]]
    target = selection.run if selection.run is not None else _newest_readable(table)
    left_column, middle, right = st.columns([22, 7, 5], vertical_alignment="center")
    labels = run_labels(table, run_label)
    options = uids if target in uids else [target, *uids]
    key = f"run_picker_{title}"  # of its own on every page: what another page's showed is no choice made on this one
    session.follow(key, target)
    left_column.selectbox(
        "Run",
        options,
        key=key,
        format_func=lambda uid: labels.get(uid, uid),
        on_change=_picked,
        args=(key,),
        label_visibility="collapsed",
    )
    try:
        reader = data.open_run(target)
    except TraceError as problem:
        widgets.error(str(problem))
        st.page_link("pages/home.py", label="All runs", icon=":material/list:")
        return None
    selection = follow_effects(reader, selection.merged({"run": target}))
    selection, clamped = data.fit(reader, selection)
    session.store(selection)
    session.write_selection()
    with middle:
        method = str(reader.meta.method)
        widgets.method_mark(method, run_name(reader.meta))
    with right:
        widgets.copy_link()
    widgets.condition_line(condition([reader]), title)
    widgets.notice(problems + clamped)
    widgets.status_banner(reader.status, reader.n_steps, reader.error)
    if not reader.n_steps:
        st.info("Nothing was decoded in this run, so there is nothing to show.")
        return None
    return reader, selection


def run_labels(table: pd.DataFrame, label: Callable[[Mapping[Any, Any], str], str]) -> dict[str, str]:
    """Return uid -> the label of a run, with what tells it from the table's other runs of its method. label: makes it
    of a row and these words. Runs whose settings were not read yet have none."""
    rows = table.to_dict("records")
    listed_runs = listing_of(data.runs_dir()).read([str(row["uid"]) for row in rows], 0.0)
    words = differences_in(rows, listed_runs, (DTYPE, QUESTION, SEED))
    return {str(row["uid"]): label(row, differs) for row, differs in zip(rows, words, strict=True)}


def run_label(row: Mapping[Any, Any], differs: str = "") -> str:
    """A run in the picker: its name, when, method and preset, what tells it from the others, model, budget, prompt
    length, steps; the status when it is not whole."""
    get, preset = row.get, _text(row.get("preset"))
    parts = [
        _text(get("name")),
        str(get("created") or "")[:16].replace("T", " "),
        data.row_title(row) + (f" ({preset})" if preset else ""),
        differs,
    ]
    if _true(get("hold")) or _true(get("changed")):
        parts.append("what-if")
    elif _true(get("forced")):
        parts.append("forced")
    if text := _text(get("model")):
        parts.append(f"model {short_model(text)}")
    if _text(get("budget_bytes")):  # without a budget its parameters may still hold it, which run.json does not say
        parts.append(phrase(budget_of(row)))
    for name, unit in (("prompt_tokens", "prompt tokens"), ("steps", "steps")):
        if (value := get(name)) == value and value is not None:
            parts.append(f"{int(value):,} {unit[:-1] if int(value) == 1 else unit}")
    if get("status") != "completed":
        parts.append(str(get("status")))
    return " · ".join(part for part in parts if part) + f" · {get('uid')}"


def short_label(row: Mapping[Any, Any], differs: str = "") -> str:
    """A run where several are picked: its name, method, what tells it from the others, budget, what was done to it,
    when, the end of its uid."""
    get = row.get
    uid = _text(get("uid"))
    parts = [_text(get("name"))] if _text(get("name")) else []
    parts += [data.row_title(row) or "unreadable", *([differs] if differs else [])]
    parts += [budget_of(row)] if _text(get("budget_bytes")) else []
    parts += ["what-if"] if _true(get("hold")) or _true(get("changed")) else ["forced"] if _true(get("forced")) else []
    return " · ".join([*parts, str(get("created") or "")[5:16].replace("T", " "), f"…{uid.rpartition('-')[2]}"])


def _text(value: object) -> str:
    return "" if value is None or value != value else str(value)


def _true(value: object) -> bool:
    return value is not None and value == value and bool(value)


def _newest_readable(table: object) -> str:
    rows = table[table["status"] != "unreadable"]  # type: ignore[index]
    return str((rows if len(rows) else table)["uid"].iloc[0])  # type: ignore[index]


def _picked(key: str) -> None:
    """Another run opens on its own step of loss, or at its beginning; the metric is kept where it exists."""
    uid = st.session_state[key]
    session.change({"run": uid, "step": None, "span": None, "layer": None, "head": None})
