"""The runs of the Compare page: their pickers, which two of them are laid over each other, and what to say when there
are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.compare.names import short_names
from kvlens.app.compare.pair import Pair
from kvlens.app.ui.common import comparing, data, sentences, session, widgets
from kvlens.app.ui.common.comparing import MOST, Comparison
from kvlens.app.ui.common.frame import run_labels, short_label
from kvlens.app.ui.compare import requested_runs
from kvlens.app.ui.compare.finding import Finding, finding, in_focus
from kvlens.store.reader import TraceError, TraceReader


@dataclass(frozen=True)
class Compared:
    """What the page is about."""

    runs: dict[str, TraceReader]
    """by a name of few words, full KV first"""
    comparison: Comparison
    a: str
    """name of the run that B is laid over"""
    b: str
    """name of the run in focus"""

    @property
    def findings(self) -> list[Finding]:
        """What came of each, in order."""
        return [find_loss(reader) for reader in self.runs.values()]

    @property
    def stem(self) -> str:
        """How files about all runs are called."""
        a, b = (self.runs[name].uid for name in (self.a, self.b))
        return f"compare-{a}-{b}" if len(self.runs) == 2 else f"compare-{len(self.runs)}-runs-{b}"

    def pair(self) -> Pair:
        """The two that are laid over each other; reads their tokens."""
        return Pair.read(self.runs[self.a], self.runs[self.b])


def find_loss(reader: TraceReader) -> Finding:
    """What came of the run, found once."""
    return _find_loss(reader, reader.uid, reader.stamp)


@st.cache_data(max_entries=128, show_spinner="Reading the runs…")
def _find_loss(_reader: TraceReader, uid: str, changed: int) -> Finding:
    return finding(_reader, data.loss_verdict(_reader))


def choose() -> Compared | None:
    """Draws the picker and returns the runs; None when there is nothing to compare, said on the page."""
    table = data.runs()
    if len(table) < 2:
        which = sentences.NO_RUNS if table.empty else sentences.ONE_RUN
        st.info(f"{which} Start a run with its full-KV reference, then come back to see what it lost and saved.")
        st.page_link("pages/run.py", label="Start a run", icon=":material/play_arrow:")
        return None
    comparison, focus, problems = requested_runs.read_request(table)
    _picker(table, comparison.runs)
    widgets.notice(problems)
    if len(comparison.runs) < 2:
        st.info(sentences.TWO_READABLE_RUNS)
        comparing.keep(comparison)
        session.write_url(requested_runs.address(comparison))
        return None
    readers = _open_runs(comparison.runs)
    if len(readers) < 2:
        return None
    return _compared(readers, replace(comparison, runs=tuple(reader.uid for reader in readers)), focus)


def current() -> Compared | None:
    """The runs that `choose` found, for a part of the page that runs again by itself."""
    kept_tokens = comparing.read_comparison()
    if kept_tokens is None or len(kept_tokens.runs) < 2:
        return None
    return _compared([data.open_run(uid) for uid in kept_tokens.runs], kept_tokens, session.selection()[0].run)


def _open_runs(uids: Sequence[str]) -> list[TraceReader]:
    """The runs that can be read and decoded something; of the others the page says what is wrong."""
    readers = []
    for uid in uids:
        try:
            reader = data.open_run(uid)
        except TraceError as problem:
            widgets.error(str(problem))
            continue
        if not reader.n_steps:
            st.info(f"Nothing was decoded in {uid}, so there is nothing to compare it by.")
            continue
        widgets.status_banner(reader.status, reader.n_steps, f"{uid}; {reader.error}" if reader.error else uid)
        readers.append(reader)
    return readers


def _is_full(reader: TraceReader) -> bool:
    return str(reader.meta.method) == methods.REFERENCE and not reader.meta.interfered


def _compared(readers: Sequence[TraceReader], comparison: Comparison, focus: str | None) -> Compared:
    """With the run in focus, and the one it is laid over: that which was asked for, else its reference, else full KV,
    else the first other one."""
    uids = [reader.uid for reader in readers]
    full = {reader.uid for reader in readers if _is_full(reader)}
    if focus not in uids:
        focus = in_focus([find_loss(reader) for reader in readers], full)
    reference = readers[uids.index(str(focus))].meta.reference
    rest = [uid for uid in uids if uid != focus]
    against = next(uid for uid in (comparison.against, reference, *sorted(full), *rest) if uid in rest)
    comparison = replace(comparison, runs=tuple(uids), against=against)
    comparing.keep(comparison)
    session.store(session.selection()[0].merged({"run": focus}))
    names = dict(zip(uids, short_names(readers), strict=True))
    runs = {names[reader.uid]: reader for reader in readers}
    return Compared(runs, comparison, names[str(against)], names[str(focus)])


def _picker(table: pd.DataFrame, runs: tuple[str, ...]) -> None:
    """Runs of the first one's prompt come first."""
    labels = run_labels(table, short_label)
    prompt = requested_runs.prompt_of(runs[0]) if runs else None
    options = sorted(labels, key=lambda uid: prompt is None or requested_runs.prompt_of(uid) != prompt)
    left_column, link = st.columns([14, 1.6], vertical_alignment="bottom")
    session.follow("compare_runs", list(runs))
    left_column.multiselect(
        "Runs",
        options,
        key="compare_runs",
        format_func=lambda uid: labels.get(uid, uid),
        max_selections=MOST,
        select_all=False,
        on_change=_picked,
        placeholder="Two runs or more",
        help=f"Two to {MOST} runs. Those of the same prompt as the first one come first in the list.",
    )
    with link:
        widgets.copy_link()


def _picked() -> None:
    """Other runs: the one in focus stays where it is among them; the race they may have been is one no more."""
    runs, kept_tokens = tuple(st.session_state["compare_runs"]), comparing.read_comparison() or Comparison()
    choice = session.selection()[0].run
    requested_runs.change(Comparison(runs, kept_tokens.against), {} if choice in runs else {"run": None, "span": None})


def pair_picker(compared: Compared) -> None:
    """Which two runs are laid over each other."""
    names = {reader.uid: name for name, reader in compared.runs.items()}
    a, b = (compared.runs[name].uid for name in (compared.a, compared.b))
    left_column, middle, swap = st.columns([7, 7, 1.6], vertical_alignment="bottom")
    for place, key, uid, label in ((left_column, "compare_a", a, "A"), (middle, "compare_b", b, "B (second run)")):
        session.follow(key, uid)
        place.selectbox(
            label,
            list(names),
            key=key,
            format_func=lambda item: names.get(item, item),
            on_change=_pair_picked,
            args=(compared.comparison, a, b),
        )
    swap.button(
        "Swap",
        on_click=_show,
        args=(compared.comparison, b, a),
        icon=":material/swap_horiz:",
        width="stretch",
        help="A becomes B, B becomes A",
    )


def _pair_picked(comparison: Comparison, a: str, b: str) -> None:
    """Another A or B; picking the one that is on the other side swaps them."""
    earlier, second = st.session_state["compare_a"], st.session_state["compare_b"]
    if earlier == second:
        earlier, second = b, a
    _show(comparison, earlier, second)


def _show(comparison: Comparison, a: str, b: str) -> None:
    requested_runs.change(replace(comparison, against=a), {"run": b, "span": None})
