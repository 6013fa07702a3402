"""The trials of one cell of a grid, failing first, and the way from each to its Replay."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.grid import Cell
from kvlens.app.ui.benchmarks import result_files
from kvlens.app.ui.benchmarks.griddata import Suite, trials_of
from kvlens.app.ui.common import data, places, sentences
from kvlens.app.ui.common.submit import submit_trial
from kvlens.app.ui.common.widgets import error, plain
from kvlens.lens.severity import KL_THERE, MARGIN_THERE
from kvlens.text.units import counted

SHOWN = (
    "score",
    "outcome",
    "left_full_kv_at_step",
    "kl_at_loss_nats",
    "margin_logits",
    "answer",
    "output",
    "coverage",
    "selection_recall",
    "attended_tokens",
    "resident_share",
    "read_share",
    "h2d_bytes_per_step",
    "seed",
    "infeasible",
    "refused",
    "uid",
)


READ = "bytes of KV and index that a step reads, share of full KV, mean over the steps"


def came_out(rows: list[dict[str, Any]]) -> str:
    """'1 of 2 right'; of trials that were refused alone, why none was run."""
    finished = [row for row in rows if row["exact"] is not None]
    if finished:
        return f"{sum(row['exact'] == 1 for row in finished)} of {len(finished)} right"
    if not rows:
        return "not run"
    if all(row["score"] is None and row["steps"] for row in rows):
        return f"{counted(len(rows), 'prompt')}, none judged"
    if all(row["infeasible"] is not None for row in rows):
        return f"{counted(len(rows), 'prompt')}, none run: the budget is too small"
    return f"{counted(len(rows), 'prompt')}, none run: refused"


def show_trials(suite: Suite, task: str, cell: Cell) -> None:
    """The first failing trial of the cell, or the one selected in their table, can be opened or run again."""
    results = trials_of(suite, task, cell)
    method, budget, length, depth = cell
    limit = f"budget {budget}" if budget else "no limit"
    name = result_files.titles_measured(suite.model, suite.about).get(method, method)
    title = f"{name}, {limit}, {length:,} tokens, depth {depth:.0%}"
    st.markdown(f"##### {plain(f'{title}: {came_out(results)}')}")
    if not results:
        st.info("This cell was not run.")
        return
    top = st.container()
    key = f"trials_{suite.name}_{task}_{method}_{budget}_{length}_{depth}"
    event = st.dataframe(
        pd.DataFrame([{name: row[name] for name in SHOWN} for row in results]).dropna(axis=1, how="all"),
        hide_index=True,
        key=key,
        column_config=_columns(),
        on_select="rerun",
        selection_mode="single-row",
        height=min(38 + 35 * len(results), 320),
    )
    rows = event["selection"]["rows"] if event else []
    place = int(rows[0]) if rows and rows[0] < len(results) else 0
    with top:
        open_trial(results[place], suite.about, rows == [])


def _columns() -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "score": number("score", format="%.2f", help="1: the answer is right; of a list the share of right entries"),
        "left_full_kv_at_step": number("left full KV at step", format="%d"),
        "kl_at_loss_nats": number("KL there (nats)", format="%.3g", help=KL_THERE),
        "margin_logits": number("logits apart there", format="%.3g", help=MARGIN_THERE),
        "answer": "expected",
        "output": "output",
        "coverage": number("coverage", format="%.2f"),
        "selection_recall": number("selection recall", format="%.2f"),
        "seed": number("seed", format="%d"),
        "attended_tokens": number("attended tokens", format="%.0f"),
        "resident_share": number("resident share", format="percent"),
        "read_share": number("read share", format="percent", help=READ),
        "h2d_bytes_per_step": number("to device per step (bytes)", format="compact"),
        "infeasible": number("needs share of full KV", format="percent"),
        "refused": "refused because",
        "uid": "stored run",
    }


def open_trial(row: dict[str, Any], about: dict[str, Any], is_first: bool) -> None:
    """Replay of the trial's stored run, or a button that runs the very trial again."""
    which = "failing" if row["score"] is not None and row["score"] < 1 else "selected" if not is_first else "first"
    sentence = (
        f"The {which} trial with seed {row['seed']}: expected {str(row['answer']).strip()!r}, came "
        f"{str(row['output']).strip()!r}."
    )
    if row["refused"] or row["infeasible"] is not None:
        st.text(
            f"The trial with seed {row['seed']} was not run"
            + (f": {row['refused']}" if row["refused"] else " at this budget.")
        )
        return
    st.text(sentence)
    if row["uid"] is not None and data.stamp(row["uid"]):
        st.page_link(
            "pages/replay.py", label="Open in Replay", icon=":material/replay:", query_params=places.in_run(row["uid"])
        )
        return
    model = str(about.get("request", {}).get("model", "demo"))
    left_column, right = st.container(), st.container()
    key = f"bench_rerun_{row['task']}_{row['method']}_{row['budget']}_{row['seed']}"
    words = sentences.RUN_TRIAL_AGAIN
    if left_column.button(words, type="primary", icon=":material/play_arrow:", key=key):
        try:
            job = submit_trial({**row, "model": model})
        except ValueError as problem:
            error(f"{str(problem)[0].upper()}{str(problem)[1:]}".rstrip(".") + ".")
            return
        st.switch_page("pages/run.py", query_params={"job": job})
    right.caption("No trace of it is in the runs folder. Its prompt comes from its seed, so the run is the same.")
