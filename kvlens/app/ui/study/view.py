"""A stored study: how far it is, its matrix, curves, paired comparison, and the Replay behind every trial."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.curves import curves, is_other_preset
from kvlens.app.ui.common import data, places
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.exportruns import export_menu
from kvlens.app.ui.common.foresightview import foreseeing
from kvlens.app.ui.common.ledgerview import study_ledgers
from kvlens.app.ui.common.parts import download
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.study import control, judgement
from kvlens.models.find import short_model
from kvlens.studies import storage
from kvlens.studies.figures import FIGURES
from kvlens.studies.paired import compare, sentence_of
from kvlens.studies.table import Results

POLL_S = 2.0
QUESTIONS = {"in": "question read with the context", "after": "question fed after the context"}
_COLUMNS = {
    "label": "arm",
    "ran_preset": "preset",
    "n": "n",
    "right": "right",
    "interval": "95 % interval",
    "cut_off": "wrong, cut off",
    "same_output": "same output as full KV",
    "kl_mean_nats": "mean KL (nats)",
    "compared_steps": "steps compared",
    "resident_share": "resident",
    "read_share": "read",
    "moved_bytes_per_step": "moved per step (bytes)",
    "corrected_share": "corrected",
    "refused": "refused",
    "failed": "failed",
}
_FORMATS = {
    **dict.fromkeys(("right", "cut_off", "same_output", "resident_share", "read_share", "corrected_share"), "percent"),
    "kl_mean_nats": "%.4f",
    "compared_steps": "%.1f",
    "moved_bytes_per_step": "compact",
}


def show_study(study_id: str) -> None:
    """Draw the study; while some process carries it out, again every POLL_S seconds."""
    running = storage.is_running(data.runs_dir(), study_id)
    st.fragment(_study, run_every=POLL_S if running else None)(study_id)


def _study(study_id: str) -> None:
    results = Results.read(data.runs_dir(), study_id)
    _heading(results)
    if not results.trials:
        st.caption("No trial has ended yet.")
        return
    group = _group(results)
    _matrix(results, group)
    _curve(results)
    _paired(results)
    judgement.checks_of(results)
    judgement.beside_paper_of(results)
    study_ledgers(results)
    foreseeing(_uids(results), f"kvlens-study-{results.info.id}")
    _trials(results, group)


def _heading(results: Results) -> None:
    plan = results.info.plan
    st.subheader(plain(plan.name or f"Study {results.info.id}"), anchor=False)
    condition = " · ".join(
        (
            short_model(plan.shared.model),
            f"{len(results.prompts)} prompts",
            " and ".join(QUESTIONS[question] for question in plan.questions),
            f"{plan.shared.dtype} KV",
            f"at most {plan.shared.max_new} new tokens",
            *([f"{results.info.batch} prompts at once"] if results.info.batch > 1 else []),
        )
    )
    st.caption(plain(condition))
    share = results.ended / results.planned if results.planned else 0.0
    running = storage.is_running(data.runs_dir(), results.info.id)
    st.progress(share, text=f"{results.ended:,} of {results.planned:,} trials have ended")
    control.controls(results, running)


def _uids(results: Results) -> list[str]:
    """The stored runs of the study, each once."""
    return list(dict.fromkeys(trial.uid for trial in results.trials if trial.uid is not None))


def _group(results: Results) -> str | None:
    groups = sorted({prompt.group for prompt in results.prompts if prompt.group})
    if len(groups) < 2:
        return None
    return st.pills("Prompts", groups, key="study_group", help="Only the prompts of this group.")


def _matrix(results: Results, group: str | None) -> None:
    st.markdown("##### Every arm")
    frame = results.matrix(group)
    interval = [
        "" if not row.n else f"{row.right_low:.0%} to {row.right_high:.0%}"
        for row in frame.itertuples()
        if hasattr(row, "right_low")
    ]
    shown = frame.assign(interval=interval or "")
    names = [name for name in _COLUMNS if name in shown and shown[name].notna().any() and shown[name].ne("").any()]
    if "cut_off" in names and not shown["cut_off"].gt(0).any():
        names.remove("cut_off")
    st.dataframe(shown[names], hide_index=True, column_config={name: _column(name) for name in names}, placeholder="—")
    st.caption(
        "An arm is one configuration: method, parameters, budget, place of the question, seed. n: prompts whose answer "
        "is judged. Other columns are means over trials. resident: the peak on the device. read: what a step reads. "
        "Both are shares of full KV with all new tokens that the limit allows; a step reads the tokens so far. What a "
        "method needs beside keys and values is resident too, so FullKV has more than 100 %. The budget of a method "
        "that keeps all KV limits the tokens it attends. A refused arm needs more than its budget. Steps are compared "
        "up to the first token that differs from full KV's; mean KL is over them. Times per step are in the download."
    )
    with st.container(horizontal=True):
        download(results.frame(), f"kvlens-study-{results.info.id}")
        export_menu(_uids(results), f"kvlens-study-{results.info.id}-runs")


def _column(name: str) -> Any:
    meaning = FIGURES[name][0] if name in FIGURES else None
    if name in _FORMATS:
        return st.column_config.NumberColumn(_COLUMNS[name], help=meaning, format=_FORMATS[name])
    return st.column_config.Column(_COLUMNS[name], help=meaning)


def _curve(results: Results) -> None:
    axes = results.axes()
    if not axes:
        return
    st.markdown("##### Along an axis")
    left_column, right_column = st.columns(2)
    axis = left_column.selectbox("Axis", axes, key="study_axis")
    measured = [name for name in FIGURES if any(name in (trial.figures or {}) for trial in results.trials)]
    figure = right_column.selectbox("Figure", measured, key="study_figure", format_func=lambda name: FIGURES[name][0])
    points = results.curve(str(axis), str(figure))
    if points.empty:
        st.caption("No trial with this figure has ended.")
        return
    title, unit = FIGURES[str(figure)]
    name = f"kvlens-study-{results.info.id}-{figure}"
    named = {"x": str(axis), **{column: f"{column}_{unit or figure}" for column in ("value", "low", "high")}}
    numbers = points.assign(uids=points["uids"].map(" ".join)).rename(columns=named)
    chart(curves(points, str(axis), title, unit), numbers, name, "study_curve", f"{title} of every arm along {axis}.")
    if any(any(is_other_preset(part)) for _, part in points.groupby("line", sort=False)):
        st.caption("A hollow point ran another preset than the first point of its line: more than the axis differs.")


def _paired(results: Results) -> None:
    names = list(results.labels.values())
    if len(names) < 2 or not any(prompt.source.answer for prompt in results.prompts):
        return
    st.markdown("##### Two arms on the same prompts")
    left_column, right_column = st.columns(2)
    arm_a, arm_b = _first_pair(results, names)
    study = results.info.id
    a = left_column.selectbox("A", names, index=names.index(arm_a), key=f"study_a_{study}")
    b = right_column.selectbox("B", names, index=names.index(arm_b), key=f"study_b_{study}")
    if a == b:
        st.caption("Choose two different arms.")
        return
    paired = compare(results, str(a), str(b))
    st.markdown(plain(sentence_of(paired, str(a), str(b))))
    if not paired.splits:
        return
    rows = [{"prompt": split.prompt, "right under": a if split.right == "a" else b} for split in paired.splits]
    event = st.dataframe(
        pd.DataFrame(rows), hide_index=True, on_select="rerun", selection_mode="single-row", key=f"study_splits_{a}_{b}"
    )
    if rows_chosen := event["selection"]["rows"]:
        split = paired.splits[rows_chosen[0]]
        with st.container(horizontal=True):
            for name, uid in ((a, split.uid_a), (b, split.uid_b)):
                _replay_link(f"Replay of {name}", uid)


def _first_pair(results: Results, names: list[str]) -> tuple[str, str]:
    """Return the first two arms with a prompt whose answers are judged under both; the first two arms if there are
    none."""
    frame = results.frame()
    judged = frame[(frame["state"] == "completed") & frame["right"].notna()] if "right" in frame else frame.iloc[:0]
    prompts = {label: set(part["prompt"]) for label, part in judged.groupby("label")} if len(judged) else {}
    pairs = (pair for pair in combinations(names, 2) if prompts.get(pair[0], set()) & prompts.get(pair[1], set()))
    return next(pairs, (names[0], names[1]))


def _trials(results: Results, group: str | None) -> None:
    st.markdown("##### Every trial")
    frame = results.frame()
    if group is not None:
        frame = frame[frame["group"] == group]
    columns = [
        "prompt",
        "label",
        "outcome",
        "output",
        "lost_at_step",
        "kl_at_loss_nats",
        "kl_mean_nats",
        "compared_steps",
        "message",
    ]
    names = [name for name in columns if name in frame and frame[name].notna().any()]
    event = st.dataframe(
        frame[names],
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        key=f"study_trials_{results.info.id}_{group}",
        height=280,
        placeholder="—",
    )
    st.caption("Click the box of a row. A link then opens the Replay of that trial.")
    if (rows_chosen := event["selection"]["rows"]) and rows_chosen[0] < len(frame):
        row = frame.iloc[rows_chosen[0]]
        _replay_link(f"Replay of {row['prompt']} under {row['label']}", row["uid"])


def _replay_link(words: str, uid: object) -> None:
    if isinstance(uid, str):
        place = places.in_run(uid)
        st.page_link("pages/replay.py", label=plain(words), icon=":material/play_circle:", query_params=place)
