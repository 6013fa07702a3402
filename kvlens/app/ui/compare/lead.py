"""The head of the Compare page: the runs side by side, answers and verdicts first."""

from __future__ import annotations

import html

import pandas as pd
import streamlit as st

from kvlens import methods
from kvlens.app.compare.pair import Pair
from kvlens.app.compare.together import Together
from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.theme import VERMILION
from kvlens.app.ui.common import data, places
from kvlens.app.ui.common.chart import menu
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.compare.finding import Finding
from kvlens.app.ui.compare.pick import Compared
from kvlens.lens.knob import held_to
from kvlens.memory.budget import in_words, phrase
from kvlens.runs import races
from kvlens.store.reader import TraceError, TraceReader
from kvlens.text.plaintext import visible
from kvlens.text.units import si_bytes

_HEADS = ("Run", "Answer", "Left full KV", "Missed most there, and why", "Peak, of full KV", "To the device")
_CELL = "padding:.3rem .7rem .3rem 0;vertical-align:top;text-align:left;border-bottom:1px solid rgba(128,128,128,.3)"
_FAINT = "opacity:.72"
_MOST = 150
"""characters of an answer"""


def side_by_side(compared: Compared) -> None:
    """One row per run, and ways to their replays."""
    runs, findings = compared.runs, compared.findings
    expected = {one.outcome.expected for one in findings}
    shared = next(iter(expected)) if len(expected) == 1 else None
    if shared:
        st.text(f"Expected: {visible(_line(shared))}")
    head = "".join(f'<th style="{_CELL};{_FAINT};font-weight:600">{name}</th>' for name in _HEADS)
    letters = {compared.a: "A", compared.b: "B"}
    rows = "".join(
        _row(name, reader, one, letters.get(name, ""), None if shared else one.outcome.expected)
        for (name, reader), one in zip(runs.items(), findings, strict=True)
    )
    st.html(
        '<div style="overflow-x:auto">'
        '<table class="answers" style="width:100%;border-collapse:collapse;font-size:.86rem">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("Replay:", width="content")
        for name, one in zip(runs, findings, strict=True):
            st.page_link(
                "pages/replay.py",
                label=plain(visible(name)),
                icon=":material/play_circle:",
                query_params=places.in_run(one.uid),
            )
        menu(_file(compared), f"{compared.stem}-answers", "compare_answers", image=False)


def apart(pair: Pair, found: Together) -> None:
    """Which runs cannot be laid beside B, where that is not said of the two that are laid over each other."""
    if found.left_out and (pair.apart is None or len(found.left_out) > 1):
        st.caption(plain(" ".join(found.left_out)))


def _row(name: str, reader: TraceReader, one: Finding, letter: str, expected: str | None) -> str:
    look, meta = mark(str(reader.meta.method)), reader.meta
    about = " · ".join([*([str(meta.preset)] if meta.preset else []), held_to(meta)])
    tag = f'<span style="{_FAINT}">{letter}</span> ' if letter else ""
    run = (
        f'{tag}<span style="color:{look.color}" title="{_safe(look.family.replace("_", " "))}">{look.character}</span> '
        f"<b>{_safe(name)}</b><br><span style='{_FAINT}' title='{_safe(one.uid)}'>{_safe(about)}</span>"
    )
    said = f'<span title="{_safe(_line(one.output)[:2000])}">{_cut(one.output)}</span>'
    said += f"<br>{_outcome(one)}"
    if expected and not one.outcome.words.startswith("right"):
        said += f'<br><span style="{_FAINT}">expected: {_safe(_line(expected))}</span>'
    if one.full_output is not None and one.outcome.lost_at is not None and not one.outcome.right and not one.forced:
        said += f'<br><span style="{_FAINT}">full KV answers: {_cut(one.full_output)}</span>'
    cells = (run, said, _left(one, reader), _missed(one), _device(one), _safe(si_bytes(one.h2d_bytes)))
    widths = ("15%", "23%", "10%", "", "11%", "8%")
    return f"<tr>{''.join(_cell(cell, width) for cell, width in zip(cells, widths, strict=True))}</tr>"


def _cell(content: str, width: str) -> str:
    return f'<td style="{_CELL}{f";width:{width}" if width else ""}">{content}</td>'


def _outcome(one: Finding) -> str:
    words = "fed full KV's tokens" if one.forced else one.outcome.words or "no answer is known"
    wrong = f"color:{VERMILION};font-weight:600" if one.outcome.words.startswith("wrong") else _FAINT
    return f'<span style="{wrong}">{_safe(words)}</span>'


def _left(one: Finding, reader: TraceReader) -> str:
    """At which step, and KL there."""
    if one.outcome.lost_at is None:
        return f'<span style="{_FAINT}">{_never(one, reader)}</span>'
    kl = one.outcome.kl
    more = "" if kl is None or kl != kl else f'<br><span style="{_FAINT}">KL {kl:.3g} nats</span>'
    return f"step {one.outcome.lost_at}{more}"


def _never(one: Finding, reader: TraceReader) -> str:
    if one.compared:
        return "never"
    return "full KV itself" if reader.meta.method == methods.REFERENCE else "not recorded"


def _missed(one: Finding) -> str:
    if one.outcome.lost_at is None:
        return ""
    if one.missed is None:
        return f'<span style="{_FAINT}">not recorded</span>'
    cause, why = str(one.cause), str(one.why)
    return f'{_safe(one.missed)}<br><span style="{_FAINT}" title="{_safe(why)}">Why: {_safe(cause)}</span>'


def _device(one: Finding) -> str:
    size = _safe(si_bytes(one.peak_bytes))
    return size if one.peak_share is None else f'{one.peak_share:.1%}<br><span style="{_FAINT}">{size}</span>'


def _line(text: str) -> str:
    return " ".join(text.split())


def _cut(output: str) -> str:
    """An output, shortened, inside HTML."""
    line = _line(output)
    return _safe(line if len(line) <= _MOST else f"{line[:_MOST]}…") or "no text"


def _safe(text: str) -> str:
    """Text from elsewhere inside HTML."""
    return html.escape(visible(text))


def _file(compared: Compared) -> pd.DataFrame:
    """The rows as a file."""
    findings = compared.findings
    return pd.DataFrame(
        {
            "run": [one.uid for one in findings],
            "name": list(compared.runs),
            "output": [one.output for one in findings],
            "expected": [one.outcome.expected for one in findings],
            "full_kv_output": [one.full_output for one in findings],
            "outcome": [one.outcome.words for one in findings],
            "left_full_kv_at_step": pd.array([one.outcome.lost_at for one in findings], "Int64"),
            "kl_there_nats": [one.outcome.kl for one in findings],
            "margin_logits": [one.outcome.margin for one in findings],
            "at_stop_token": [one.outcome.stop for one in findings],
            "missed_most": [one.missed for one in findings],
            "cause": [one.cause for one in findings],
            "why": [one.why for one in findings],
            "peak_on_device_bytes": [one.peak_bytes for one in findings],
            "peak_share_of_full_kv": [one.peak_share for one in findings],
            "to_device_bytes": [one.h2d_bytes for one in findings],
        }
    )


def of_race(race_id: str | None) -> None:
    """That the runs are a race's lanes, the way back to these, and what is not among them; nothing for other runs."""
    if race_id is None:
        return
    try:
        race = races.read(data.runs_dir(), race_id)
    except TraceError:
        return  # deleted since
    titles = data.titles()
    gone = [
        f"{titles.get(lane.method, lane.method)} is not among them, {lane.message or lane.state}".rstrip(".")
        for lane in race.lanes
        if lane.uid is None
    ]
    with st.container(horizontal=True, vertical_alignment="center"):
        said = f"The lanes of a race, {phrase(in_words(race.budget))}, {race.created[:16].replace('T', ' ')} UTC."
        st.text(visible(" ".join([said, *(f"{one}." for one in gone)])), width="content")
        st.page_link(
            "pages/run.py", label="Back to the lanes", icon=":material/sports_score:", query_params={"race": race_id}
        )
