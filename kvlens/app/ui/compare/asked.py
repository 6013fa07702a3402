"""Which runs the Compare page is asked to show: by its URL (`runs`, `race`, or `run` with `cmp`), by what it showed
last, or by nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.compare.groups import default_pair, partner
from kvlens.app.ui.common import comparing, data, lensdata, session
from kvlens.app.ui.common.comparing import MOST, Comparison
from kvlens.runs import races
from kvlens.store.files import read_plain
from kvlens.store.reader import TraceError

PARAMETERS = ("runs", "race", "cmp", "against")
KNOWN = 4000
"""runs whose prompts' names stay in memory"""
_WRITTEN = "kvlens_comparison_written"


def asked(table: pd.DataFrame) -> tuple[Comparison, str | None, list[str]]:
    """The runs to show, which of them is in focus if that is known, and what was wrong with those asked for."""
    chosen, problems = session.selection()
    uids, run = set(table["uid"]), chosen.run
    given = {name: st.query_params[name] for name in PARAMETERS if name in st.query_params}
    kept = comparing.kept()
    if given and given != st.session_state.get(_WRITTEN):  # a pasted link, Back, a link of another page
        st.session_state[_WRITTEN] = given
        wanted, run, said = _of_address(given, run)
        problems = [*problems, *said]
    elif kept is not None and (run is None or run in kept.runs):
        left = tuple(uid for uid in kept.runs if uid in uids)
        return replace(kept, runs=_ordered(left, table), race=kept.race if left == kept.runs else None), run, problems
    else:
        wanted = Comparison((run,) if run is not None else ())
    unknown = [uid for uid in wanted.runs if uid not in uids]
    problems += [f"run {uid[:40]!r} is not among the runs; left out" for uid in unknown]
    runs = tuple(dict.fromkeys(uid for uid in wanted.runs if uid not in unknown))
    if len(runs) > MOST:
        problems.append(f"a comparison takes at most {MOST} runs, not {len(runs)}; showing the first {MOST}")
        runs = runs[:MOST]
    if len(runs) < min(2, len(wanted.runs)) and not unknown and (given.get("runs") or given.get("cmp")):
        problems.append("one run was named; comparing it with another")
    runs, run = _completed(runs, run if run in runs else None, table)
    runs = _ordered(runs, table)
    return replace(wanted, runs=runs, race=wanted.race if set(runs) <= set(wanted.runs) else None), run, problems


def _of_address(given: Mapping[str, str], run: str | None) -> tuple[Comparison, str | None, list[str]]:
    """As the URL has it. `run` beside `cmp` is A, and `cmp` is B."""
    against = given.get("against")
    if "race" in given:
        try:
            race = races.read(data.runs_dir(), given["race"])
        except TraceError as problem:
            return Comparison((run,) if run else ()), run, [str(problem).rstrip(".")]
        return Comparison(tuple(lane.uid for lane in race.lanes if lane.uid), against, race.id), run, []
    if "runs" in given:
        return Comparison(tuple(filter(None, map(str.strip, given["runs"].split(",")))), against), run, []
    if "cmp" in given:
        return Comparison((run, given["cmp"]) if run else (given["cmp"],), run), given["cmp"], []
    return Comparison((run,) if run else (), against), run, []


def _completed(runs: tuple[str, ...], run: str | None, table: pd.DataFrame) -> tuple[tuple[str, ...], str | None]:
    """Two runs at least where there are two: a run alone is laid over its partner, one that can be read."""
    while len(runs) < 2:
        other = partner(table, runs[0], prompt_of) if runs else None
        pair = default_pair(table, prompt_of) if not runs else None
        found = (other, *runs) if other else pair[::-1] if pair else ()
        bad = [uid for uid in found if uid not in runs and not _opens(uid)]
        if not bad:
            return (found, run or found[-1]) if found else (runs, run)
        table = table[~table["uid"].isin(bad)]
    return runs, run


def _opens(uid: str) -> bool:
    try:
        return bool(data.open_run(uid).n_steps)
    except TraceError:
        return False


def _ordered(runs: tuple[str, ...], table: pd.DataFrame) -> tuple[str, ...]:
    """Full KV first, what the others are compared with."""
    full = set(table.loc[(table["method"] == methods.REFERENCE) & ~lensdata.truth(table["hold"]), "uid"])
    return tuple(sorted(runs, key=lambda uid: uid not in full))


def address(comparison: Comparison) -> dict[str, str]:
    """The page's own URL parameters, which from now on are its own writing."""
    found = comparison.address()
    st.session_state[_WRITTEN] = found
    return found


def change(comparison: Comparison, fields: Mapping[str, object]) -> None:
    """Another comparison, or another run in focus. The address that came with the change is older than it."""
    comparing.keep(comparison)
    st.session_state[_WRITTEN] = {name: st.query_params[name] for name in PARAMETERS if name in st.query_params}
    session.change(fields)


def prompt_of(uid: str) -> str | None:
    """Names the run's prompt by its text; None when the text was not kept. Read once: a page asks it of every run."""
    known, run = _prompts(str(data.runs_dir())), (uid, data.stamp(uid))
    found = known.get(run, "")
    if found == "":
        try:
            found = hashlib.sha256(read_plain(data.runs_dir() / uid / "prompt.txt")).hexdigest()
        except (OSError, ValueError):
            found = None
        if len(known) >= KNOWN:
            known.clear()
        known[run] = found
    return found


@st.cache_resource(max_entries=4, show_spinner=False)
def _prompts(folder: str) -> dict[tuple[str, int], str | None]:
    """What is known of a folder's prompts: (uid, when its trace was last changed) -> name. All sessions share it, and
    any of them may empty it at any time."""
    return {}
