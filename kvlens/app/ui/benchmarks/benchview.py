"""The Benchmarks page: measured tables that came with this copy of kvlens, or that the user measured. Nothing here is
modelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.quality import AXES, COSTS, quality, table
from kvlens.app.figures.qualityranks import ranked
from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.trials import READ
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import error, headings, plain
from kvlens.lab.bench.joined import alike, one
from kvlens.lab.bench.qualitypage import ORDER
from kvlens.lab.results.names import measured_on, name_methods
from kvlens.lab.results.summary import arm_titles

RANKED = "by method"
"""how a quality table is shown first"""


def where(about: dict[str, Any]) -> str:
    """'2026-01-01, AMD EPYC, 2 cores, torch 2.13.0': on what a figure was measured."""
    machine = about.get("machine", {})
    parts = [
        measured_on(about) if about.get("date") else None,
        machine.get("processor"),
        f"{machine.get('cores')} cores" if machine.get("cores") else None,
    ]
    parts.append(f"torch {about['torch']}" if about.get("torch") else None)
    return ", ".join(str(part) for part in parts if part)


def show_quality(model: str | None) -> None:
    """Exact match of every method against what it cost on a model, and the table behind it."""
    st.markdown("##### Quality at equal budgets")
    results, damaged = result_files.list_results("quality", model)
    if not results:
        if not damaged:
            result_files.nothing("quality table was measured", "quality", model)
        return
    result = _choose_table(joined(results))
    try:
        about = result.content["about"]
        request = about["request"]
        frame = table(
            result.content["lines"], request["model"], request["length"], result.content["about"].get("presets", {})
        )
        tasks, length, order = request["tasks"], request["length"], ORDER[request.get("question", "in")]
        counts = f"{about['trials']} of {about['planned']} trials"
    except (KeyError, TypeError):
        error(f"The file {result.name} lacks fields this version needs; measure it again.")
        return
    titles = arm_titles(result_files.titles_measured(request["model"], about), frame["method"])
    axes = (RANKED, *(cost for cost in COSTS if frame[cost].notna().any()))
    if st.session_state.get("bench_axis") not in axes:
        st.session_state.pop("bench_axis", None)
    axis = st.segmented_control(
        "Exact match",
        axes,
        default=RANKED,
        format_func=lambda a: RANKED if a == RANKED else f"against {_low(AXES[a][0].partition(':')[0])}",
        key="bench_axis",
        required=True,
    )
    frame = _of_families(frame)
    figure = ranked(frame, titles) if axis == RANKED else quality(frame, str(axis), titles)
    chart(figure, frame, "kvlens-quality", "bench_quality", "Exact match by method, task and budget")
    st.caption(
        plain(
            f"Model {request['model']}, prompts of {length} tokens, {order}, tasks {', '.join(tasks)}; {counts}. Bars "
            "are 95 % Wilson intervals. Budgets are shares of full KV in float32 on the device. Papers count 16-bit "
            "KV: their shares have a column of their own. A method that keeps every token (*) attends that share of "
            "its tokens; one without a parameter for a share (†) is held to nothing. Slot tables, a method's index and "
            "generated tokens count too, so shares can pass 100 %. "
            f"Measured {where(about)}."
        )
    )
    show = frame.assign(
        method=[titles.get(name, name) for name in frame["method"]], budget=frame["budget"].replace("", "no limit")
    )
    with st.expander("The figures as a table"):
        table_of = show.dropna(axis=1, how="all")
        names = headings(table_of.columns, columns())
        st.dataframe(table_of, hide_index=True, column_config=names, height=320, placeholder="—")
        download(frame, "kvlens-quality")


def _of_families(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the families that are chosen; all of them where none is."""
    families = [mark(str(name)).family for name in frame["method"]]
    choice = st.pills(
        "Families",
        list(dict.fromkeys(families)),
        selection_mode="multi",
        format_func=lambda family: family.replace("_", " "),
        key="bench_families",
        help="None chosen: all.",
    )
    return frame[[family in choice for family in families]] if choice else frame


def _low(title: str) -> str:
    return title[0].lower() + title[1:]


def joined(results: list[result_files.ResultFile]) -> list[result_files.ResultFile]:
    """Tables that differ in their budgets alone are one, named by its files."""
    names = {id(result.content): result.name for result in results}
    groups = alike(result.content for result in results)
    return [
        result_files.ResultFile(" and ".join(names[id(part)] for part in members), results[0].model, one(members))
        for members in groups
    ]


def _choose_table(measured_results: list[result_files.ResultFile]) -> result_files.ResultFile:
    """The table to show, chosen where a model has several: by length and by the question's order."""
    if len(measured_results) == 1:
        return measured_results[0]
    names = {result.name: result for result in sorted(measured_results, key=result_files.sort_key)}
    if st.session_state.get("bench_table") not in names:
        st.session_state["bench_table"] = next(iter(names))
    choice = st.segmented_control(
        "Table", list(names), key="bench_table", required=True, format_func=_label_tables(names)
    )
    return names[str(choice)]


def _label_tables(names: dict[str, result_files.ResultFile]) -> Callable[[str], str]:
    """How a table is offered: what it was asked, with tasks, budgets and methods where another was asked as much."""
    requests = {name: result.content["about"].get("request", {}) for name, result in names.items()}

    def short(name: str) -> str:
        return f"{requests[name].get('length', '?')} tokens, {ORDER.get(requests[name].get('question', 'in'), '')}"

    many: Counter[Any] = Counter(map(short, names))
    many.update((short(name), ", ".join(requests[name].get("tasks", ()))) for name in names)

    def asked_of(name: str) -> tuple[str, ...]:
        return short(name), *requests[name].get("tasks", ())

    lists = Counter(key for key, _ in {(asked_of(name), name_methods(requests[name])) for name in names})

    def label_of(name: str) -> str:
        tasks = ", ".join(requests[name].get("tasks", ())) if many[short(name)] > 1 else ""
        suffix = f" at {', '.join(requests[name].get('budgets', ()))}" if many[short(name), tasks] > 1 else ""
        suffix += f", {name_methods(requests[name])}" if lists[asked_of(name)] > 1 else ""
        return plain(f"{short(name)}: {tasks}{suffix}" if tasks else short(name))

    return label_of


def columns() -> dict[str, Any]:
    """How the columns of a summary are shown."""
    number = st.column_config.NumberColumn
    return {
        "exact": number("exact match", format="%.2f"),
        "low": number("95 % low", format="%.2f"),
        "high": number("95 % high", format="%.2f"),
        "score": number("score", format="%.2f", help="for lists the share of right entries, else exact match"),
        "coverage": number("coverage", format="%.2f"),
        "selection_recall": number("selection recall", format="%.2f"),
        "presets": "preset",
        "attended_tokens": number("attended tokens", format="%.0f"),
        "attended_share": number("attended share", format="percent"),
        "resident_share": number("resident share", format="percent"),
        "read_share": number("read share", format="percent", help=READ),
        "read_bytes_per_step": number("read per step (bytes)", format="compact"),
        "smallest_feasible": number("smallest feasible", format="percent"),
        "rule": "held to",
        "n": "prompts",
        "h2d_bytes_per_step": number("to device per step (bytes)", format="compact"),
        "d2h_bytes_per_step": number("to host memory per step (bytes)", format="compact"),
    }
