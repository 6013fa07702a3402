"""The text as the run had it at the step of loss: every token in the colour of where its span lay for the KV head that
missed most."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pandas as pd

from kvlens.app.figures.states import STATE_COLORS
from kvlens.app.report.markup import missing, paragraph, safe
from kvlens.lens.verdict import Verdict
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage
from kvlens.text.units import counted
from kvlens.text.words import STATE_MEANINGS, STATES

MOST = 6_000
"""tokens that are shown, around what was missed most"""
HOLE, NEEDLE, MISSED = 1, 2, 4
"""marks of a token: full KV attended it and no form of it was attended; it is the needle's; its span was missed most"""


def strip(reader: TraceReader, found: Verdict | None) -> str:
    """The tokens with their colours and marks, and what these mean; a sentence where nothing was lost or missed."""
    if found is None or found.missed is None:
        return missing("The text at the step of loss: no step was lost, or what was missed there was not recorded.")
    missed, tokens = found.missed, reader.tokens()
    written = int(tokens["step"].isna().sum()) + found.step
    states = token_states(reader, found.step, missed.layer, missed.kv_head, written)
    marks = _marks(reader, found, tokens, written)
    first_token = max(0, min(missed.tok_start - MOST // 2, written - MOST))
    last = min(written, first_token + MOST)
    pieces = [
        _piece(passage(tokens, run[0], run[-1] + 1), state, mark)
        for (state, mark), places in groupby(range(first_token, last), key=lambda at: (states[at], int(marks[at])))
        for run in [list(places)]
    ]
    prefix, suffix = (
        f'<span class="cut">… {counted(n, "token")} …</span>' if n else "" for n in (first_token, written - last)
    )
    shown = [state for state in STATE_COLORS if state in set(states[first_token:last])]
    legend = "".join(
        f'<span style="background:{STATE_COLORS[state]}55">{safe(STATES[state])}</span> {safe(STATE_MEANINGS[state])}; '
        for state in shown
    )
    note = (
        f"As L{missed.layer} KV{missed.kv_head} had it while step {found.step} attended. Framed: the span missed most. "
        "Struck through in red: tokens that full KV attended and this head in no form, at most eight per query head. "
        "Bold: the needle."
    )
    return (
        f'<p class="strip">{prefix}{"".join(pieces)}{suffix}</p><p class="legend">{legend}no colour: not recorded.</p>'
        + paragraph(note, "note")
    )


def token_states(reader: TraceReader, step: int, layer: int, kv_head: int, written: int) -> list[str | None]:
    """Where each of the first `written` tokens lay for a KV head while a step attended: the state of its span; the
    window's are resident, None: not recorded."""
    spans = reader.spans()
    lay = dict(reader.span_states(step, layer, kv_head)[["span", "state"]].itertuples(index=False, name=None))
    alive = spans[(spans["born_step"] <= step) & ~(spans["died_step"] <= step)]
    window = (alive["kind"] == "window").any()
    states: list[str | None] = ["resident" if window and lay else None] * written
    for span, start, end in alive.loc[alive["kind"] != "window", ["span", "tok_start", "tok_end"]].itertuples(
        index=False, name=None
    ):
        states[int(start) : min(int(end), written)] = [lay.get(span)] * (min(int(end), written) - int(start))
    return states


def _marks(reader: TraceReader, found: Verdict, tokens: pd.DataFrame, written: int) -> np.ndarray:
    """int [written]: sums of HOLE, NEEDLE and MISSED."""
    assert found.missed is not None
    missed, marks = found.missed, np.zeros(written, int)
    group = reader.q_heads // reader.kv_heads
    lost = reader.lost_tokens(found.step)
    head_rows = lost[(lost["layer"] == missed.layer) & (lost["q_head"] // group == missed.kv_head)]
    holes = head_rows["pos"].to_numpy(int)
    marks[np.unique(holes[holes < written])] |= HOLE
    starts, ends = (tokens[name].to_numpy(float, na_value=np.nan)[:written] for name in ("char_start", "char_end"))
    for start, end in reader.meta.needle:
        marks[(starts < end) & (ends > start)] |= NEEDLE
    if missed.kind != "window":
        marks[missed.tok_start : missed.tok_end] |= MISSED
    return marks


def _piece(text: str, state: str | None, mark: int) -> str:
    names = [name for bit, name in ((HOLE, "hole"), (NEEDLE, "needle"), (MISSED, "missed")) if mark & bit]
    color = f' style="background:{STATE_COLORS[state]}55"' if state in STATE_COLORS else ""
    kind = f' class="{" ".join(names)}"' if names else ""
    return f"<span{kind}{color}>{safe(text)}</span>"
