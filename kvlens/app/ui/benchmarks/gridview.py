"""The Benchmarks page's grids: where in a prompt of which length a method loses the answer, and the trials behind every
cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.grid import BESIDE, FEWER, grid
from kvlens.app.figures.gridcells import FEW
from kvlens.app.ui.benchmarks import benchview, result_files
from kvlens.app.ui.benchmarks.gridcondition import condition_of
from kvlens.app.ui.benchmarks.griddata import NAMES, Look, Suite, cells, lines, noise_floor, read_look, suites
from kvlens.app.ui.benchmarks.gridlines import show_against
from kvlens.app.ui.benchmarks.trials import show_trials
from kvlens.app.ui.common import sentences, session
from kvlens.app.ui.common.chart import chart, menu
from kvlens.app.ui.common.widgets import condition_line, copy_link, error, headings, notice, plain
from kvlens.lab.bench.qualitypage import ORDER
from kvlens.models import catalogue

_LOOK, _WRITTEN = "bench_look", "bench_written"
VIEWS = ("Exact match", "Difference from full KV")


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


def _keep(view: Look) -> None:
    st.session_state[_LOOK] = view
    st.session_state[_WRITTEN] = view.query()
    session.write_url(view.query())


def choose_model(view: Look, problems: list[str]) -> str | None:
    """The model whose results are shown: a switch where several were measured, the real one first; None where none
    was."""
    results = result_files.models()
    if not results:
        return None
    target = view.model
    if target is None and view.suite in (sweeps := suites(result_files.folder())[0]):
        target = sweeps[view.suite].model
    if target is not None and target not in results:
        problems.append(f"nothing was measured on the model {target[:40]!r}; showing {results[0]}")
    if st.session_state.get("bench_model") not in results:
        st.session_state["bench_model"] = target if target in results else results[0]
    return str(
        st.segmented_control(
            "Model",
            results,
            key="bench_model",
            required=True,
            persist_state="session",
            format_func=lambda name: plain(catalogue.label(name)),
        )
    )


def has_sweep(model: str | None) -> bool:
    """Whether there is a sweep of the model to show."""
    return any(suite.model == model for suite in suites(result_files.folder())[0].values())


def show_grid(model: str | None, view: Look, problems: list[str]) -> None:
    """Grids of one sweep of a model and task, the trials of the selected cell, and exact match against what it cost."""
    if view.model not in (None, model):
        view = Look()
    left_column, right = st.columns([6, 1], vertical_alignment="bottom")
    left_column.markdown("##### Where the answer is lost")
    every, damaged = suites(result_files.folder())
    results = {name: suite for name, suite in every.items() if suite.model == model}
    for sentence in damaged:
        error(f"{sentence[0].upper()}{sentence[1:]}")
    if not results:
        notice(problems)
        if not damaged:
            result_files.nothing("sweep was measured", "sweep", model)
        _keep(Look(model=model))
        return
    with right:
        copy_link()
    suite, task, difference = _controls(results, view, problems)
    table = cells(suite, task, difference)
    view = Look(suite.name, task, view.method, view.budget, view.length, view.depth, model)
    view = _keep_known_cell(view, table, problems)
    notice(problems)
    if table.empty:
        _scores(suite, task)
    else:
        condition_line(condition_of(suite, table), "Benchmarks")
        if view.cell is None:
            _draw(suite, task, table, view, difference)
        else:
            grids, trials = st.columns([7, 4], gap="medium")
            with grids:
                _draw(suite, task, table, view, difference)
            with trials, st.container(key="bench_cell"):  # follows the scroll, see nav.STYLE
                show_trials(suite, task, view.cell)
        show_against(suite, task, _file(suite, task))
        session.set_condition("")
    _keep(view)


def _scores(suite: Suite, task: str) -> None:
    """A task without a grid: the mean score of every method and budget."""
    st.info(sentences.NO_LENGTH_AND_DEPTH)
    frame = lines(suite, task, ()).drop(columns=["budget_share", "infeasible", "rule"])
    st.dataframe(frame, hide_index=True, column_config=headings(frame.columns, benchview.columns()))
    menu(frame, _file(suite, task), "bench_scores", image=False)


def _controls(suites_by_key: dict[str, Suite], view: Look, problems: list[str]) -> tuple[Suite, str, bool]:
    names = list(suites_by_key)
    if view.suite is not None and view.suite not in suites_by_key:
        problems.append(f"sweep {view.suite[:40]!r} is not in the results folder; showing {names[0]}")
    places = st.columns([2, 4, 5] if len(names) > 1 else [4, 7], vertical_alignment="bottom")
    second, third = places[-2:]
    if st.session_state.get("bench_suite") not in suites_by_key:
        st.session_state["bench_suite"] = view.suite if view.suite in suites_by_key else names[0]
    name = (
        places[0].selectbox("Sweep", names, key="bench_suite", persist_state="session") if len(names) > 1 else names[0]
    )
    suite = suites_by_key[str(name)]
    tasks = suite.tasks()
    if view.task is not None and view.task not in tasks:
        problems.append(f"task {view.task[:40]!r} is not in this sweep; showing {tasks[0]}")
    if st.session_state.get("bench_task") not in tasks:
        st.session_state["bench_task"] = view.task if view.task in tasks else tasks[0]
    task = second.segmented_control(
        "Task", tasks, key="bench_task", required=True, persist_state="session", format_func=task_label
    )
    mode = third.segmented_control(
        "Colour", VIEWS, default=VIEWS[0], key="bench_view", required=True, persist_state="session"
    )
    return suite, str(task), mode == VIEWS[1]


def task_label(name: str) -> str:
    """A task's name as Markdown shows it; of a file the kind and the file, without its folder."""
    kind, colon, path = name.partition(":")
    return plain(f"{kind}: {Path(path).name}" if colon else name)


def _file(suite: Suite, task: str) -> str:
    """Stem of the names of downloaded files."""
    return re.sub(r"[^0-9A-Za-z._-]+", "-", f"kvlens-{suite.name}-{task}")


def _keep_known_cell(view: Look, table: pd.DataFrame, problems: list[str]) -> Look:
    """The look, without a cell that the sweep does not have."""
    if view.cell is None:
        return view
    if table.empty:
        return view.move_to(None)
    rows = table[["method", "budget", "length", "depth"]].itertuples(index=False, name=None)
    if view.cell in set(rows):
        return view
    problems.append("the selected cell is not in this sweep; none selected")
    return view.move_to(None)


def _draw(suite: Suite, task: str, table: pd.DataFrame, view: Look, difference: bool) -> None:
    key = f"bench_grid_{suite.name}_{task}_{difference}_{view.method}_{view.budget}_{view.length}_{view.depth}"
    chart(
        _figure(
            table,
            result_files.titles_measured(suite.model, suite.about),
            view.cell,
            difference,
            BESIDE if view.cell is None else FEWER,
        ),
        table.drop(columns=["value", "note"]),
        _file(suite, task),
        key,
        f"{task}: exact match by depth and length, a panel per method and budget",
        on_select=lambda: _clicked(key, view),
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
            f"Click a cell for its trials. Grey: n/r not run, inf. infeasible at that budget. {few}Budgets are shares "
            "of full KV in float32 on the device. A method that keeps all KV there attends that share of its tokens. "
            f"Each cell has prompts of its own, the same for every method, at most {int(table['n'].max())}. Model "
            f"{suite.model}, {ORDER[str(request.get('question', 'in'))]}, {about.get('trials')} of "
            f"{about.get('planned')} trials of the sweep. {noise_floor(suite, task)}Measured {benchview.where(about)}."
        )
    )


def _clicked(key: str, view: Look) -> None:
    """A click on a cell selects it; a second one on the same cell takes the selection back."""
    state = st.session_state.get(key)
    points = state["selection"]["points"] if state else []
    target: Any = points[0].get("customdata") if points else None
    if isinstance(target, list) and len(target) == 4:
        cell = (str(target[0]), str(target[1]), int(target[2]), float(target[3]))
        st.session_state[_LOOK] = view.move_to(None if cell == view.cell else cell)
        st.session_state[_WRITTEN] = {name: st.query_params[name] for name in NAMES if name in st.query_params}
