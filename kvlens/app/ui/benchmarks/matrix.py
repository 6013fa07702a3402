"""All quality tables of a model as one matrix, and the lost trials behind a cell of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.qualitymatrix import COSTS, FREE_TEXT, Cell, cells, matrix, shade
from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.trials import open_trial
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import error, plain
from kvlens.budget import Budget
from kvlens.lab.bench.joined import joined
from kvlens.lab.results.summary import arm_titles
from kvlens.runs.request import DEFAULT_SHARE

FIXED = ("method", "family", "mean rank", *COSTS.values())
KEPT = ("answer", "output", "depth", "seed", "preset")
"""what the list of lost trials shows"""
MEANT = {
    "resident": "resident (peak, share of full KV in float32)",
    "read": "read (by a step, share of full KV in float32)",
    "attended": "attended (share of the prompt)",
    "selection recall": "selection recall",
}
"""column -> what it is, for the caption"""


def show_matrix(model: str | None) -> None:
    """Every method in every table of the model; nothing where there is no table."""
    tables = [item for item in result_files.files("quality")[0] if item.model == model]
    whole = joined(item.content for item in sorted(tables, key=result_files.sort_key))
    results = [*whole, *(item.content for item in _texts(model))]
    try:
        every = cells(results)
        matrix(every)  # figures of another kind show here, before anything is drawn
    except (KeyError, TypeError):
        return  # said where the tables are shown one by one
    if not every:
        return
    st.markdown("##### Every method in every table")
    outcome_rows = _choose_cells(every, str(model))
    frame = matrix(outcome_rows)
    columns = [name for name in frame.columns if name not in FIXED]
    matches = [name for name in columns if not name.startswith(FREE_TEXT)]
    families = _pills("Families", dict.fromkeys(frame["family"]), str(model))
    if families:
        frame = frame[frame["family"].isin(families)].reset_index(drop=True)
    titles = arm_titles(result_files.titles_measured(model, *(result["about"] for result in results)), frame["method"])
    shown = frame.assign(
        method=[titles.get(name, name) for name in frame["method"]], family=frame["family"].str.replace("_", " ")
    )
    event = st.dataframe(
        shown.style.map(shade, subset=pd.Index(matches)),
        hide_index=True,
        key=f"matrix_{model}_{'_'.join([*families, *columns])}",  # what is selected is known by its row and column
        on_select="rerun",
        selection_mode="single-cell",
        column_config=_config(columns),
        height=min(40 + 35 * len(shown), 355),
        placeholder="—",
    )
    if cell_places := event["selection"].get("cells"):
        row, name = cell_places[0]
        if (
            name in columns
            and row < len(frame)
            and (cell := outcome_rows.get((frame["method"][row], name))) is not None
        ):
            _lost(cell, titles.get(frame["method"][row], frame["method"][row]), name)
    costs = ", ".join(MEANT[name] for name in frame.columns if name in MEANT)
    counts = sorted({cell.line["n"] for cell in outcome_rows.values() if cell.line["n"] and cell.measure == "exact"})
    prompts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
    text = " Of free text: KL to full KV, nats per token, less is better." if matches != columns else ""
    st.caption(
        plain(
            f"Model {model}. Exact match, n = {prompts} prompts a cell; the chart and the download have the intervals. "
            "—: infeasible at that budget, not run, or not measured. Mean rank: the mean of a method's places in the "
            "columns of exact match, for methods with a value in all of them. Equal methods share a place. Means over "
            f"the columns that have them: {costs}. A click on a heading sorts. A click on a cell lists the lost "
            f"trials.{text}"
        )
    )
    download(_long(every), "kvlens-quality-matrix")


def _choose_cells(cells_by_key: dict[tuple[str, str], Cell], model: str) -> dict[tuple[str, str], Cell]:
    """The cells of the budgets and tasks that are chosen; at first of the share that a run is held to by itself."""
    budgets = sorted({cell.budget for cell in cells_by_key.values()}, key=lambda budget: Budget.parse(budget).amount)
    usual = f"{float(DEFAULT_SHARE):.0%}"
    left_column, right = st.columns([1, 3])
    with left_column:
        held = _pills("Budgets", budgets, model, [usual] if usual in budgets else [])
    with right:
        task_choice = _pills("Tasks", dict.fromkeys(cell.subject for cell in cells_by_key.values()), model)
    takes = {
        key: cell
        for key, cell in cells_by_key.items()
        if (not held or cell.budget in held) and (not task_choice or cell.subject in task_choice)
    }
    if not takes:
        st.caption("No table has this task at this budget: all tables are shown.")
    return takes or cells_by_key


def _pills(label: str, options: Iterable[str], model: str, default: Sequence[str] = ()) -> list[str]:
    """What of the options is chosen, [] for all; each model has choices of its own, since its tables are others."""
    return st.pills(
        label,
        list(options),
        selection_mode="multi",
        default=list(default),
        format_func=lambda name: name.replace("_", " ") if label == "Families" else name,
        key=f"matrix_{label.lower()}_{model}",
        help="None chosen: all.",
    )


def _texts(model: str | None) -> list[result_files.ResultFile]:
    """Tables of free text; of a damaged one it is said here, since nothing else shows it."""
    whole = []
    for item in result_files.list_results("text", model)[0]:
        try:
            damaged = any("kl" not in line for line in item.content["lines"])
            matrix(cells([item.content]))
        except (KeyError, TypeError):
            damaged = True
        if damaged:
            error(f"The file {item.name} lacks fields this version needs; measure it again.")
        else:
            whole.append(item)
    return whole


def _config(columns: list[str]) -> dict[str, Any]:
    number = st.column_config.NumberColumn
    each = {
        name: number(format="%.3f", help="less is better")
        if name.startswith(FREE_TEXT)
        else number(format="%.2f", help="exact match")
        for name in columns
    }
    each |= {title: number(format="percent") for title in COSTS.values()}
    each["selection recall"] = number(format="%.2f")
    each["mean rank"] = number(format="%.1f", pinned=True)
    return each | {"method": st.column_config.TextColumn(pinned=True)}


def _long(cells_by_key: dict[tuple[str, str], Cell]) -> pd.DataFrame:
    """A row per cell, with its interval."""
    kept_tokens = (
        "n",
        "exact",
        "low",
        "high",
        "kl",
        "kl_low",
        "kl_high",
        "agreement",
        "infeasible",
        "smallest_feasible",
        "rule",
        *COSTS,
    )
    return pd.DataFrame(
        {"method": name, "column": column} | {key: cell.line.get(key) for key in kept_tokens}
        for (name, column), cell in cells_by_key.items()
    )


def _of_text(cell: Cell) -> str:
    line, fed = cell.line, cell.request["tokens"]
    is_known = line.get("kl_low") is not None
    within = f" (95 %: {line['kl_low']:.3f} to {line['kl_high']:.3f})" if is_known else ""
    return (
        f"KL {line['kl']:.4f} nats per token{within}; the same token most likely at {line['agreement']:.1%} of "
        f"{line['n'] * fed:,} tokens, {fed} behind each of {line['n']} passages."
    )


def _lost(cell: Cell, title: str, column: str) -> None:
    """The trials of a cell that were lost; the selected one may be run again."""
    line, lost = cell.line, cell.lost
    st.markdown(f"##### {plain(f'{title}: {column}')}")
    if not line["n"]:
        needs = line.get("smallest_feasible")
        st.text(f"Infeasible: it needs {needs:.0%} of full KV." if needs else line.get("refused") or "It was not run.")
        return
    if cell.measure == "kl":
        st.text(_of_text(cell))
        return
    right = round(line["exact"] * line["n"])
    st.text(f"{right} of {line['n']} right, 95 % interval {line['low']:.2f} to {line['high']:.2f}.")
    if not lost:
        if right < line["n"]:
            why = (
                "A control's trials are not run here."
                if line.get("dtype")
                else ("This table does not name its trials; measure it again.")
            )
            st.caption(why)
        return
    top = st.container()
    event = st.dataframe(
        pd.DataFrame([{name: row.get(name) for name in KEPT} for row in lost]).rename(
            columns={"answer": "expected", "output": "came"}
        ),
        hide_index=True,
        key=f"matrix_lost_{title}_{column}",
        on_select="rerun",
        selection_mode="single-row",
        height=min(38 + 35 * len(lost), 320),
    )
    rows = event["selection"]["rows"]
    with top:
        open_trial(lost[int(rows[0])] if rows and rows[0] < len(lost) else lost[0], {"request": cell.request}, not rows)
