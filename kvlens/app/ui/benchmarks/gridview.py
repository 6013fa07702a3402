"""The Benchmarks page's grids: where in a prompt of which length a method loses the answer, and the trials behind every
cell."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.grid import FEW, grid
from kvlens.app.figures.quality import AXES, COSTS, quality
from kvlens.app.ui.benchmarks import benchview, measured
from kvlens.app.ui.benchmarks.griddata import NAMES, Look, Suite, cells, lines, noise_floor, read_look, suites
from kvlens.app.ui.benchmarks.trials import show_trials
from kvlens.app.ui.common import data, session
from kvlens.app.ui.common.chart import chart, menu
from kvlens.app.ui.common.widgets import copy_link, error, headings, notice, plain
from kvlens.lab.bench.qualitypage import ORDER
from kvlens.models import catalogue

_LOOK, _WRITTEN = "bench_look", "bench_written"
VIEWS = ("Exact match", "Difference from full KV")
ASKED = ("budget_share", "length")
"""axes that say what was asked for; the others, what it came to"""


_figure = st.cache_data(max_entries=32, show_spinner=False)(grid)


def look() -> tuple[Look, list[str]]:
    """What is looked at. A URL that this session did not write itself (pasted link, Back button) wins over the
    session."""
    params = {name: st.query_params[name] for name in NAMES if name in st.query_params}
    problems: list[str] = []
    if params and params != st.session_state.get(_WRITTEN):
        st.session_state[_LOOK], problems = read_look(params)
        for key in ("bench_model", "bench_suite", "bench_task"):
            st.session_state.pop(key, None)
    return st.session_state.get(_LOOK, Look()), problems


def _keep(chosen: Look) -> None:
    st.session_state[_LOOK] = chosen
    st.session_state[_WRITTEN] = chosen.query()
    session.write_url(chosen.query())


def choose_model(chosen: Look, problems: list[str]) -> str | None:
    """The model whose results are shown: a switch where several were measured, the real one first; None where none
    was."""
    found = measured.models()
    if not found:
        return None
    wanted = chosen.model
    if wanted is None and chosen.suite in (sweeps := suites(measured.folder())[0]):
        wanted = sweeps[chosen.suite].model
    if wanted is not None and wanted not in found:
        problems.append(f"nothing was measured on the model {wanted[:40]!r}; showing {found[0]}")
    if st.session_state.get("bench_model") not in found:
        st.session_state["bench_model"] = wanted if wanted in found else found[0]
    return str(
        st.segmented_control(
            "Model",
            found,
            key="bench_model",
            required=True,
            persist_state="session",
            format_func=lambda name: plain(catalogue.label(name)),
        )
    )


def has_sweep(model: str | None) -> bool:
    """Whether there is a sweep of the model to show."""
    return any(suite.model == model for suite in suites(measured.folder())[0].values())


def show_grid(model: str | None, chosen: Look, problems: list[str]) -> None:
    """Grids of one sweep of a model and task, the trials of the selected cell, and exact match against what it cost."""
    if chosen.model not in (None, model):
        chosen = Look()
    left, right = st.columns([6, 1], vertical_alignment="bottom")
    left.markdown("##### Where the answer is lost")
    every, damaged = suites(measured.folder())
    found = {name: suite for name, suite in every.items() if suite.model == model}
    for sentence in damaged:
        error(f"{sentence[0].upper()}{sentence[1:]}")
    if not found:
        notice(problems)
        if not damaged:
            measured.nothing("sweep was measured", "sweep", model)
        _keep(Look(model=model))
        return
    with right:
        copy_link()
    suite, task, difference = _controls(found, chosen, problems)
    table = cells(suite, task, difference)
    chosen = Look(suite.name, task, chosen.method, chosen.budget, chosen.length, chosen.depth, model)
    chosen = _known(chosen, table, problems)
    notice(problems)
    if table.empty:
        _scores(suite, task)
    else:
        _draw(suite, task, table, chosen, difference)
        if chosen.cell is not None:
            show_trials(suite, task, chosen.cell)
        _against(suite, task)
    _keep(chosen)


def _scores(suite: Suite, task: str) -> None:
    """A task without a grid: the mean score of every method and budget."""
    st.info("The prompts of this task have no length and depth to order them by; here are its mean scores.")
    frame = lines(suite, task, ()).drop(columns=["budget_share", "infeasible", "rule"])
    st.dataframe(frame, hide_index=True, column_config=headings(frame.columns, benchview.columns()))
    menu(frame, _file(suite, task), "bench_scores", image=False)


def _controls(found: dict[str, Suite], chosen: Look, problems: list[str]) -> tuple[Suite, str, bool]:
    names = list(found)
    if chosen.suite is not None and chosen.suite not in found:
        problems.append(f"sweep {chosen.suite[:40]!r} is not in the results folder; showing {names[0]}")
    places = st.columns([2, 4, 5] if len(names) > 1 else [4, 7], vertical_alignment="bottom")
    second, third = places[-2:]
    if st.session_state.get("bench_suite") not in found:
        st.session_state["bench_suite"] = chosen.suite if chosen.suite in found else names[0]
    name = (
        places[0].selectbox("Sweep", names, key="bench_suite", persist_state="session") if len(names) > 1 else names[0]
    )
    suite = found[str(name)]
    tasks = suite.tasks()
    if chosen.task is not None and chosen.task not in tasks:
        problems.append(f"task {chosen.task[:40]!r} is not in this sweep; showing {tasks[0]}")
    if st.session_state.get("bench_task") not in tasks:
        st.session_state["bench_task"] = chosen.task if chosen.task in tasks else tasks[0]
    task = second.segmented_control(
        "Task", tasks, key="bench_task", required=True, persist_state="session", format_func=task_label
    )
    view = third.segmented_control(
        "Colour", VIEWS, default=VIEWS[0], key="bench_view", required=True, persist_state="session"
    )
    return suite, str(task), view == VIEWS[1]


def task_label(name: str) -> str:
    """A task's name as Markdown shows it; of a file the kind and the file, without its folder."""
    kind, colon, path = name.partition(":")
    return plain(f"{kind}: {Path(path).name}" if colon else name)


def _file(suite: Suite, task: str) -> str:
    """Stem of the names of downloaded files."""
    return re.sub(r"[^0-9A-Za-z._-]+", "-", f"kvlens-{suite.name}-{task}")


def _known(chosen: Look, table: pd.DataFrame, problems: list[str]) -> Look:
    """The look, without a cell that the sweep does not have."""
    if chosen.cell is None:
        return chosen
    if table.empty:
        return chosen.at(None)
    rows = table[["method", "budget", "length", "depth"]].itertuples(index=False, name=None)
    if chosen.cell in set(rows):
        return chosen
    problems.append("the selected cell is not in this sweep; none selected")
    return chosen.at(None)


def _draw(suite: Suite, task: str, table: pd.DataFrame, chosen: Look, difference: bool) -> None:
    key = f"bench_grid_{suite.name}_{task}_{difference}_{chosen.method}_{chosen.budget}_{chosen.length}_{chosen.depth}"
    chart(
        _figure(table, data.titles(), chosen.cell, difference),
        table.drop(columns=["value", "note"]),
        _file(suite, task),
        key,
        f"{task}: exact match by depth and length, a panel per method and budget",
        on_select=lambda: _clicked(key, chosen),
    )
    about = suite.about
    few = (
        f"Dotted edge: fewer than {FEW} prompts, counted (2/3: right in two of three). "
        if (table["n"].between(1, FEW - 1)).any()
        else ""
    )
    request = about.get("request", {})
    st.caption(
        plain(
            f"Click a cell for its trials. Grey: n/r not run, inf. infeasible at that budget. {few}Budgets are "
            f"shares of full KV on the "
            "device; a method that keeps all of it there is held to that share of attended tokens. Prompts "
            "differ from cell to cell and are "
            f"the same for every method, at most {int(table['n'].max())} in a cell; model {suite.model}, "
            f"{ORDER[str(request.get('question', 'in'))]}, "
            f"{about.get('trials')} of "
            f"{about.get('planned')} trials of the sweep. {noise_floor(suite, task)}Measured {benchview.where(about)}."
        )
    )


def _clicked(key: str, chosen: Look) -> None:
    """A click on a cell selects it; a second one on the same cell takes the selection back."""
    state = st.session_state.get(key)
    points = state["selection"]["points"] if state else []
    target: Any = points[0].get("customdata") if points else None
    if isinstance(target, list) and len(target) == 4:
        cell = (str(target[0]), str(target[1]), int(target[2]), float(target[3]))
        st.session_state[_LOOK] = chosen.at(None if cell == chosen.cell else cell)
        st.session_state[_WRITTEN] = {name: st.query_params[name] for name in NAMES if name in st.query_params}


def _against(suite: Suite, task: str) -> None:
    st.markdown("##### Exact match against what it costs")
    frame = lines(suite, task, ("length",))
    first, last = ASKED
    asked = () if frame.loc[frame["budget"] != "", "budget"].nunique() == 1 else (first,)
    axes = (*asked, *(cost for cost in COSTS if cost in frame and frame[cost].notna().any()), last)
    if st.session_state.get("bench_against") not in axes:
        st.session_state.pop("bench_against", None)
    axis = str(
        st.segmented_control(
            "Against",
            axes,
            default=axes[0],
            format_func=lambda name: re.split(r"[,:(]", AXES[name][0])[0].strip(),
            key="bench_against",
            required=True,
            persist_state="session",
        )
    )
    if axis == "length":
        limited = [budget for budget in dict.fromkeys(frame["budget"]) if budget]
        free = frame[frame["budget"] == ""]
        frame = pd.concat([frame[frame["budget"] != ""], *(free.assign(panel=budget) for budget in limited)])
        frame["panel"] = frame["panel"].fillna(frame["budget"]) if "panel" in frame else frame["budget"]
        panel, names = "panel", {budget: f"budget {budget}" for budget in limited}
    else:
        panel, names = "length", {length: f"{length:,} tokens" for length in frame["length"].dropna().unique()}
    if frame.empty or frame["exact"].isna().all():
        st.info("No trial of this task has been finished.")
        return
    chart(
        quality(frame, axis, data.titles(), panel, names),
        partial(pd.DataFrame, frame),
        f"{_file(suite, task)}-by-{axis}",
        f"bench_lines_{axis}",
        f"{task}: exact match against {AXES[axis][0]}",
    )
    st.caption(
        "Over all depths; bars are 95 % Wilson intervals. A method whose prompts were all infeasible has no point."
    )
