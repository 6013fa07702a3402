"""Which two runs the Compare page looks at: pickers, the URL's `run` and `cmp`, and what to say when there are no
two."""

from __future__ import annotations

import hashlib

import pandas as pd
import streamlit as st

from kvlens.compare.groups import default_pair, partner
from kvlens.compare.pair import Pair
from kvlens.store.files import read_plain
from kvlens.store.reader import TraceError
from kvlens.ui.common import data, session, widgets
from kvlens.ui.common.frame import run_label

_CMP, _WRITTEN = "kvlens_compare", "kvlens_compare_written"


def choose_pair() -> Pair | None:
    """Draws the pickers and returns the two runs; None when there is nothing to compare, said on the page."""
    table = data.runs()
    if len(table) < 2:
        which = "There are no runs yet." if table.empty else "There is one run, and a comparison takes two."
        st.info(f"{which} Start a run with its full-KV reference, then come back to see what it lost and saved.")
        st.page_link("pages/run.py", label="Start a run", icon=":material/play_arrow:")
        return None
    wanted, problems = _wanted(table)
    if wanted is None:
        st.info("No two runs can be read; start one, then come back.")
        return None
    _pickers(table, *wanted)
    widgets.notice(problems)
    if wanted[0] == wanted[1]:
        st.info("A and B are the same run; choose another one for B.")
        return None
    readers = []
    for name, uid in zip("AB", wanted, strict=True):
        try:
            readers.append(data.open_run(uid))
        except TraceError as problem:
            widgets.error(f"{name}: {problem}")
    if len(readers) < 2:
        return None
    for name, reader in zip("AB", readers, strict=True):
        if not reader.n_steps:
            st.info(f"Nothing was decoded in {name}, so there is nothing to compare.")
            return None
        widgets.status_banner(reader.status, reader.n_steps, f"{name}; {reader.error}" if reader.error else name)
    session.store(session.selection()[0].merged({"run": wanted[0]}))
    st.session_state[_CMP] = wanted[1]
    return Pair.of(*readers)


def current() -> Pair:
    """The two runs that `choose_pair` found, for a part of the page that runs again by itself."""
    return Pair.of(data.open_run(str(session.selection()[0].run)), data.open_run(str(compared_with())))


def compared_with() -> str | None:
    """The run B that was asked for: a URL that this session did not write itself wins over the session."""
    given = st.query_params.get("cmp")
    if given and given != st.session_state.get(_WRITTEN):
        st.session_state[_CMP] = st.session_state[_WRITTEN] = given
    found = st.session_state.get(_CMP)
    return None if found is None else str(found)


def url(pair: Pair) -> dict[str, str]:
    """The page's own URL parameter."""
    st.session_state[_WRITTEN] = pair.b.uid
    return {"cmp": pair.b.uid}


def _wanted(table: pd.DataFrame) -> tuple[tuple[str, str] | None, list[str]]:
    """The runs to show, and what was wrong with those asked for."""
    chosen, problems = session.selection()
    run, other = chosen.run, compared_with()
    uids = set(table["uid"])
    if other is not None and other not in uids:
        problems = [*problems, f"run {other[:40]!r} (cmp) is not among the runs; comparing with another"]
        other = None
    if run is not None and run not in uids:
        problems = [*problems, f"run {run[:40]!r} is not among the runs; showing another"]
        run = None
    if run is None and other is None:
        return default_pair(table, prompt_of), problems
    known = str(run if run is not None else other)
    found = partner(table, known, prompt_of)
    if run is not None and other is not None:
        return (run, other), problems
    if found is None:
        return None, problems
    return ((known, found) if run is not None else (found, known)), problems


def prompt_of(uid: str) -> str | None:
    """Names the run's prompt by its text; None when the text was not kept."""
    return _prompt_of(uid, data.stamp(uid))


@st.cache_data(max_entries=4000, show_spinner=False)
def _prompt_of(uid: str, changed: int) -> str | None:
    try:
        return hashlib.sha256(read_plain(data.runs_dir() / uid / "prompt.txt")).hexdigest()
    except (OSError, ValueError):
        return None


def _pickers(table: pd.DataFrame, run: str, other: str) -> None:
    labels = {str(row["uid"]): run_label(row) for _, row in table.iterrows()}
    left, middle, swap, link = st.columns([7, 7, 1.4, 1.6], vertical_alignment="bottom")
    for place, key, uid, name in ((left, "compare_a", run, "Run A"), (middle, "compare_b", other, "Run B")):
        session.follow(key, uid)
        place.selectbox(
            name,
            list(labels),
            key=key,
            format_func=lambda item: labels.get(item, item),
            on_change=_picked,
            args=(run, other),
        )
    swap.button(
        "Swap",
        on_click=_show,
        args=(other, run),
        icon=":material/swap_horiz:",
        width="stretch",
        help="A becomes B, B becomes A",
    )
    with link:
        widgets.copy_link()


def _picked(run: str, other: str) -> None:
    """Another A or B; picking the one that is on the other side swaps them."""
    a, b = st.session_state["compare_a"], st.session_state["compare_b"]
    if a == b:
        a, b = (other, run)
    _show(a, b)


def _show(run: str, other: str) -> None:
    st.session_state[_CMP] = other
    if run != session.selection()[0].run:
        session.change({"run": run, "span": None})
    else:
        session.change({})
