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
from kvlens.app.ui.common import comparing, data, lensdata, sentences, session
from kvlens.app.ui.common.comparing import MOST, Comparison
from kvlens.files import read_plain
from kvlens.runs import races
from kvlens.store.reader import TraceError

PARAMETERS = ("runs", "race", "cmp", "against")
KNOWN = 4000
"""runs whose prompts' names stay in memory"""
_WRITTEN = "kvlens_comparison_written"


def read_request(table: pd.DataFrame) -> tuple[Comparison, str | None, list[str]]:
    """The runs to show, which of them is in focus if that is known, and what was wrong with those asked for."""
    choice, problems = session.selection()
    uids, run = set(table["uid"]), choice.run
    parameters = {name: st.query_params[name] for name in PARAMETERS if name in st.query_params}
    kept_tokens = comparing.read_comparison()
    if parameters and parameters != st.session_state.get(_WRITTEN):  # a pasted link, Back, a link of another page
        st.session_state[_WRITTEN] = parameters
        target, run, sentence = _of_address(parameters, run)
        problems = [*problems, *sentence]
    elif kept_tokens is not None and (run is None or run in kept_tokens.runs):
        remaining = tuple(uid for uid in kept_tokens.runs if uid in uids)
        return (
            replace(
                kept_tokens,
                runs=_ordered(remaining, table),
                race=kept_tokens.race if remaining == kept_tokens.runs else None,
            ),
            run,
            problems,
        )
    else:
        target = Comparison((run,) if run is not None else ())
    unknown = [uid for uid in target.runs if uid not in uids]
    problems += [f"run {uid[:40]!r} is not among the runs; left out" for uid in unknown]
    runs = tuple(dict.fromkeys(uid for uid in target.runs if uid not in unknown))
    if len(runs) > MOST:
        problems.append(f"a comparison takes at most {MOST} runs, not {len(runs)}; showing the first {MOST}")
        runs = runs[:MOST]
    if len(runs) < min(2, len(target.runs)) and not unknown and (parameters.get("runs") or parameters.get("cmp")):
        problems.append(sentences.ONE_RUN_NAMED)
    runs, run = _completed(runs, run if run in runs else None, table)
    runs = _ordered(runs, table)
    return replace(target, runs=runs, race=target.race if set(runs) <= set(target.runs) else None), run, problems


def _of_address(mapping: Mapping[str, str], run: str | None) -> tuple[Comparison, str | None, list[str]]:
    """As the URL has it. `run` beside `cmp` is A, and `cmp` is B."""
    against = mapping.get("against")
    if "race" in mapping:
        try:
            race = races.read(data.runs_dir(), mapping["race"])
        except TraceError as problem:
            return Comparison((run,) if run else ()), run, [str(problem).rstrip(".")]
        return Comparison(tuple(lane.uid for lane in race.lanes if lane.uid), against, race.id), run, []
    if "runs" in mapping:
        return Comparison(tuple(filter(None, map(str.strip, mapping["runs"].split(",")))), against), run, []
    if "cmp" in mapping:
        return Comparison((run, mapping["cmp"]) if run else (mapping["cmp"],), run), mapping["cmp"], []
    return Comparison((run,) if run else (), against), run, []


def _completed(runs: tuple[str, ...], run: str | None, table: pd.DataFrame) -> tuple[tuple[str, ...], str | None]:
    """Two runs at least where there are two: a run alone is laid over its partner, one that can be read."""
    while len(runs) < 2:
        counterpart = partner(table, runs[0], prompt_of) if runs else None
        pair = default_pair(table, prompt_of) if not runs else None
        results = (counterpart, *runs) if counterpart else pair[::-1] if pair else ()
        bad = [uid for uid in results if uid not in runs and not _opens(uid)]
        if not bad:
            return (results, run or results[-1]) if results else (runs, run)
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
    mapping = comparison.address()
    st.session_state[_WRITTEN] = mapping
    return mapping


def change(comparison: Comparison, fields: Mapping[str, object]) -> None:
    """Another comparison, or another run in focus. The address that came with the change is older than it."""
    comparing.keep(comparison)
    st.session_state[_WRITTEN] = {name: st.query_params[name] for name in PARAMETERS if name in st.query_params}
    session.change(fields)


def prompt_of(uid: str) -> str | None:
    """Names the run's prompt by its text; None when the text was not kept. Read once: a page asks it of every run."""
    known_values, run = _prompts(str(data.runs_dir())), (uid, data.stamp(uid))
    text = known_values.get(run, "")
    if text == "":
        try:
            text = hashlib.sha256(read_plain(data.runs_dir() / uid / "prompt.txt")).hexdigest()
        except (OSError, ValueError):
            text = None
        if len(known_values) >= KNOWN:
            known_values.clear()
        known_values[run] = text
    return text


@st.cache_resource(max_entries=4, show_spinner=False)
def _prompts(folder: str) -> dict[tuple[str, int], str | None]:
    """What is known of a folder's prompts: (uid, when its trace was last changed) -> name. All sessions share it, and
    any of them may empty it at any time."""
    return {}
