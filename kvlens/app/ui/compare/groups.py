"""The Compare page's part about any number of runs: quality against bytes and against attended tokens."""

from __future__ import annotations

import logging
from functools import partial

import pandas as pd
import streamlit as st

from kvlens.app.compare.groups import Trial, points, trial
from kvlens.app.figures.comparepoints import AXES, quality_points
from kvlens.app.ui.common import data, lensdata, sentences
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.widgets import guarded, plain
from kvlens.store.reader import TraceError, TraceReader

#: Newest runs that are looked at unasked: each has to be opened once, which takes some 50 ms.
FIRST = 60
_ALL = "compare_all_runs"
_LOG = logging.getLogger(__name__)


@st.fragment
@guarded
def quality() -> None:
    """All runs with a known answer as points, read when they are looked at; a sentence where there are none."""
    fold = st.expander("Quality against cost, all runs with a known answer", key="compare_quality", on_change="rerun")
    if fold.open:
        with fold:
            _quality()


def _quality() -> None:
    results, left_out = trials(bool(st.session_state.get(_ALL)))
    if left_out:
        st.button(
            f"Read the {left_out} older runs too",
            on_click=lambda: st.session_state.update({_ALL: True}),
            icon=":material/history:",
        )
    if not results:
        st.info(sentences.NO_KNOWN_ANSWER)
        return
    table = points(results)
    places = {f"{model} · {task or 'no task named'}": (model, task) for model, task in _cells(table)}
    left_column, right = st.columns(2, gap="medium")
    cell = (
        left_column.selectbox("Model and task", list(places), key="compare_cell")
        if len(places) > 1
        else next(iter(places))
    )
    model, task = places.get(str(cell), next(iter(places.values())))
    shown = table[(table["model"] == model) & (table["task"] == task)]
    costs = [name for name in AXES if name != "attended_tokens"]
    axis = str(right.selectbox("Bytes", costs, key="compare_bytes", format_func=lambda name: AXES[name]))
    titles = {name: data.method_title(name) for name in map(str, shown["method"].unique())}
    for place, name in zip(st.columns(2, gap="medium"), (axis, "attended_tokens"), strict=True):
        with place:
            _points(shown, name, titles, f"{model}-{task}")
    most = int(shown["n"].max())
    each = "one prompt" if most == 1 else f"at most {most} prompts"
    st.caption(
        plain(
            f"{model}, {task or 'no task named'}: a line per configuration (parameters, question, length, temperature, "
            f"new tokens), a point per budget, {each} each. Exact match: the task gives its full score. Without a "
            "task, the output contains the answer. Bars: 95 % Wilson intervals. Hollow: one prompt only, which shows "
            "little. The newest run of a prompt counts. Forced runs, runs with holds and answers without a score are "
            "left out." + (f" Only the newest {FIRST} runs were looked at." if left_out else "")
        )
    )


def _points(shown: pd.DataFrame, axis: str, titles: dict[str, str], name: str) -> None:
    if shown[axis].notna().any():
        chart(
            quality_points(shown, axis, titles),
            partial(_file, shown),
            f"compare-quality-{name}",
            f"compare_points_{axis}",
            f"Exact match against {AXES[axis]}",
        )
    else:
        st.info(f"{AXES[axis][0].upper()}{AXES[axis][1:]}: not recorded in these runs.")


def _file(shown: pd.DataFrame) -> pd.DataFrame:
    units = {"exact": "exact_share", "low": "exact_low_share", "high": "exact_high_share", "n": "n_prompts"}
    return shown.rename(columns=units).reset_index(drop=True)


def _cells(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(model, task) with the most prompts first."""
    sums = table.groupby(["model", "task"], sort=True)["n"].sum().sort_values(ascending=False, kind="stable")
    return [(str(model), str(task)) for model, task in sums.index]


def trials(every: bool) -> tuple[list[Trial], int]:
    """The runs with a known answer among the newest FIRST, or all, and how many were not looked at."""
    table = data.runs()
    whole = table[(table["status"] == "completed") & ~lensdata.truth(table["forced"]) & ~lensdata.truth(table["hold"])]
    uids = [str(uid) for uid in whole["uid"]]
    read = uids if every else uids[:FIRST]
    rows = [_trial(str(data.runs_dir()), uid, data.stamp(uid)) for uid in read]
    return [each for each in rows if each is not None], len(uids) - len(read)


@st.cache_data(max_entries=5000, show_spinner="Reading runs…")
def _trial(folder: str, uid: str, changed: int) -> Trial | None:
    try:
        with TraceReader.open(data.runs_dir(), uid) as reader:
            return trial(reader)
    except TraceError:
        return None
    except Exception:  # a run of another's making may say anything of itself: it is left out, the others are shown
        _LOG.exception("run %s is left out of the comparison", uid)
        return None
