"""What can be done with the runs that are ticked: look, name, note, tag, compare, export, delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from kvlens.app.ui.common import data, lensdata, places, widgets
from kvlens.app.ui.common.comparing import compare_link
from kvlens.app.ui.common.exportruns import export_menu
from kvlens.app.ui.common.jobview import links
from kvlens.store.about import NAME, NOTE, TAGS, About, change_about, read_about, write_about
from kvlens.store.reader import TraceError
from kvlens.store.recover import delete_run
from kvlens.text.units import counted


def draw_ticked(table: pd.DataFrame, uids: Sequence[str]) -> None:
    """table: all runs."""
    if len(uids) == 1:
        run_details(table, uids[0])
        links(uids[0])
        _about(table, uids[0])
    with st.container(horizontal=True, vertical_alignment="center"):
        if len(uids) > 1:
            st.text(f"{len(uids)} runs")
            compare_link(uids)
            _tag(table, uids)
        export_menu(uids, "kvlens-runs")
        _delete(table, uids)


def run_details(table: pd.DataFrame, uid: str) -> None:
    """Why a run failed, its output in full, and the runs it belongs with."""
    row = table[table["uid"] == uid].iloc[0]
    if not pd.isna(row["error"]) and row["error"]:
        widgets.error(str(row["error"]))
    if not pd.isna(row["output_text"]) and row["output_text"]:
        st.caption("Fed, full KV's tokens" if row["forced"] else "Output")
        st.code(str(row["output_text"]), language=None, wrap_lines=True)
    if related := lensdata.related(table, uid):
        with st.container(horizontal=True):
            for label, counterpart in related:
                st.page_link(
                    "pages/replay.py", label=label, icon=":material/link:", query_params=places.in_run(counterpart)
                )


def _about(table: pd.DataFrame, uid: str) -> None:
    """The form of a run's name, note and tags."""
    try:
        about = read_about(data.runs_dir() / uid)
    except TraceError as problem:
        widgets.error(str(problem))
        return
    with st.form(f"about_{uid}"):
        left_column, right = st.columns(2)
        name = left_column.text_input("Name", about.name, max_chars=NAME, key=f"about_name_{uid}")
        tags = left_column.multiselect(
            "Tags",
            list(dict.fromkeys([*about.tags, *_tags(table)])),
            about.tags,
            key=f"about_tags_{uid}",
            accept_new_options=True,
            max_selections=TAGS,
            placeholder="Choose a tag or write a new one",
        )
        note = right.text_area("Note", about.note, max_chars=NOTE, key=f"about_note_{uid}", height=125)
        if st.form_submit_button("Save", icon=":material/save:"):
            _save({uid: (About(), name, note, tags)})


def _tag(table: pd.DataFrame, uids: Sequence[str]) -> None:
    with st.popover("Tag", icon=":material/sell:"):
        tags = st.multiselect(
            "Tags to give to each", _tags(table), key="runs_tag", accept_new_options=True, max_selections=TAGS
        )
        if st.button("Tag", key="runs_tag_now", disabled=not tags):
            try:
                source = {uid: (read_about(data.runs_dir() / uid), None, None, tags) for uid in uids}
            except TraceError as problem:
                widgets.error(str(problem))
            else:
                _save(source)


def _save(changes: Mapping[str, tuple[About, str | None, str | None, list[str]]]) -> None:
    """Of each run: what is said of it, another name, another note, tags to add."""
    try:
        result = {uid: change_about(about, name, note, tags) for uid, (about, name, note, tags) in changes.items()}
        for uid, about in result.items():
            write_about(data.runs_dir(), uid, about)
    except (ValueError, TraceError) as problem:
        widgets.error(str(problem))
        return
    data.forget_runs()
    st.rerun()


def _delete(table: pd.DataFrame, uids: Sequence[str]) -> None:
    repeats = _repeats(table, uids)
    with st.popover(f"Delete {counted(len(uids), 'run')}", icon=":material/delete:"):
        with_repeats = bool(repeats) and st.checkbox(
            f"and {counted(len(repeats), 'repeat')} of {'it' if len(uids) == 1 else 'them'}: what-ifs and comparisons "
            "at all steps",
            key="runs_delete_repeats",
        )
        removed = [*uids, *(repeats if with_repeats else [])]
        st.caption("The traces are deleted from the disk and cannot be brought back.")
        if st.button(f"Delete {counted(len(removed), 'run')} for good", key="runs_delete", type="primary"):
            problems = [problem for uid in removed if (problem := _deleted(uid))]
            data.forget_runs()
            if not problems:
                st.rerun()
            for problem in problems:
                widgets.error(problem)


def _repeats(table: pd.DataFrame, uids: Sequence[str]) -> list[str]:
    """Stored repeats of these runs that are not among them: what-ifs, and repeats on full KV's tokens."""
    repeats = lensdata.truth(table["hold"]) | lensdata.truth(table["changed"]) | lensdata.truth(table["forced"])
    rows = table[table["parent"].isin(list(uids)) & repeats]
    return [str(uid) for uid in rows["uid"] if uid not in uids]


def _deleted(uid: str) -> str | None:
    """None, or one sentence why it is still there."""
    try:
        delete_run(data.runs_dir(), uid)
    except TraceError as problem:
        return str(problem)
    return None


def _tags(table: pd.DataFrame) -> list[str]:
    """All tags that any run has."""
    return list(dict.fromkeys(tag for source in table["tags"] for tag in source))
