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
from kvlens.app.ui.common import data, places, widgets
from kvlens.app.ui.common.chart import menu
from kvlens.app.ui.common.racelist import lane_name
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.compare.finding import Finding
from kvlens.app.ui.compare.pick import Compared
from kvlens.budget import in_words, phrase
from kvlens.lens.condition import condition
from kvlens.lens.knob import held_to
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
    widgets.condition_line(condition(list(runs.values())), "Compare")
    expected = {finding.outcome.expected for finding in findings}
    shared = next(iter(expected)) if len(expected) == 1 else None
    if shared:
        st.text(f"Expected: {visible(_line(shared))}")
    head = "".join(f'<th style="{_CELL};{_FAINT};font-weight:600">{name}</th>' for name in _HEADS)
    letters = {compared.a: "A", compared.b: "B"}
    rows = "".join(
        _row(name, reader, finding, letters.get(name, ""), None if shared else finding.outcome.expected)
        for (name, reader), finding in zip(runs.items(), findings, strict=True)
    )
    st.html(
        '<div style="overflow-x:auto">'
        '<table class="answers" style="width:100%;border-collapse:collapse;font-size:.86rem">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("Replay:", width="content")
        for name, finding in zip(runs, findings, strict=True):
            st.page_link(
                "pages/replay.py",
                label=plain(visible(name)),
                icon=":material/play_circle:",
                query_params=places.in_run(finding.uid),
            )
        menu(_file(compared), f"{compared.stem}-answers", "compare_answers", image=False)


def apart(pair: Pair, compared_runs: Together) -> None:
    """Which runs cannot be laid beside B, where that is not said of the two that are laid over each other."""
    if compared_runs.left_out and (pair.apart is None or len(compared_runs.left_out) > 1):
        st.caption(plain(" ".join(compared_runs.left_out)))


def _row(name: str, reader: TraceReader, finding: Finding, letter: str, expected: str | None) -> str:
    look, meta = mark(str(reader.meta.method)), reader.meta
    about = " · ".join([*([str(meta.preset)] if meta.preset else []), held_to(meta), f"KV in {meta.dtype}"])
    tag = f'<span style="{_FAINT}">{letter}</span> ' if letter else ""
    run = (
        f'{tag}<span style="color:{look.color}" title="{_safe(look.family.replace("_", " "))}">{look.character}</span> '
        f"<b>{_safe(name)}</b><br><span style='{_FAINT}' title='{_safe(finding.uid)}'>{_safe(about)}</span>"
    )
    sentence = f'<span title="{_safe(_line(finding.output)[:2000])}">{_cut(finding.output)}</span>'
    sentence += f"<br>{_outcome(finding)}"
    if expected and not finding.outcome.words.startswith("right"):
        sentence += f'<br><span style="{_FAINT}">expected: {_safe(_line(expected))}</span>'
    if (
        finding.full_output is not None
        and finding.outcome.lost_at is not None
        and not finding.outcome.right
        and not finding.forced
    ):
        sentence += f'<br><span style="{_FAINT}">full KV answers: {_cut(finding.full_output)}</span>'
    cells = (
        run,
        sentence,
        _describe_loss(finding, reader),
        _missed(finding),
        _device(finding),
        _safe(si_bytes(finding.h2d_bytes)),
    )
    widths = ("15%", "23%", "10%", "", "11%", "8%")
    return f"<tr>{''.join(_cell(cell, width) for cell, width in zip(cells, widths, strict=True))}</tr>"


def _cell(content: str, width: str) -> str:
    return f'<td style="{_CELL}{f";width:{width}" if width else ""}">{content}</td>'


def _outcome(finding: Finding) -> str:
    words = "fed full KV's tokens" if finding.forced else finding.outcome.words or "no answer is known"
    wrong = f"color:{VERMILION};font-weight:600" if finding.outcome.words.startswith("wrong") else _FAINT
    return f'<span style="{wrong}">{_safe(words)}</span>'


def _describe_loss(finding: Finding, reader: TraceReader) -> str:
    """At which step, and KL there."""
    if finding.outcome.lost_at is None:
        return f'<span style="{_FAINT}">{_never(finding, reader)}</span>'
    kl = finding.outcome.kl
    more = "" if kl is None or kl != kl else f'<br><span style="{_FAINT}">KL {kl:.3g} nats</span>'
    return f"step {finding.outcome.lost_at}{more}"


def _never(finding: Finding, reader: TraceReader) -> str:
    if finding.compared:
        return "never"
    return "full KV itself" if reader.meta.method == methods.REFERENCE else "not recorded"


def _missed(finding: Finding) -> str:
    if finding.outcome.lost_at is None:
        return ""
    if finding.missed is None:
        return f'<span style="{_FAINT}">not recorded</span>'
    if finding.cause is None:
        return _safe(finding.missed)
    cause, why = finding.cause, str(finding.why)
    return f'{_safe(finding.missed)}<br><span style="{_FAINT}" title="{_safe(why)}">Why: {_safe(cause)}</span>'


def _device(finding: Finding) -> str:
    size = _safe(si_bytes(finding.peak_bytes))
    return size if finding.peak_share is None else f'{finding.peak_share:.1%}<br><span style="{_FAINT}">{size}</span>'


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
            "run": [finding.uid for finding in findings],
            "name": list(compared.runs),
            "output": [finding.output for finding in findings],
            "expected": [finding.outcome.expected for finding in findings],
            "full_kv_output": [finding.full_output for finding in findings],
            "outcome": [finding.outcome.words for finding in findings],
            "left_full_kv_at_step": pd.array([finding.outcome.lost_at for finding in findings], "Int64"),
            "kl_at_loss_nats": [finding.outcome.kl for finding in findings],
            "margin_logits": [finding.outcome.margin for finding in findings],
            "at_stop_token": [finding.outcome.stop for finding in findings],
            "missed_most": [finding.missed for finding in findings],
            "cause": [finding.cause for finding in findings],
            "why": [finding.why for finding in findings],
            "peak_on_device_bytes": [finding.peak_bytes for finding in findings],
            "peak_share_of_full_kv": [finding.peak_share for finding in findings],
            "to_device_bytes": [finding.h2d_bytes for finding in findings],
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
    removed = [
        f"{lane_name(lane)} is not among them, {lane.message or lane.state}".rstrip(".")
        for lane in race.lanes
        if lane.uid is None
    ]
    with st.container(horizontal=True, vertical_alignment="center"):
        sentence = f"The lanes of a race, {phrase(in_words(race.budget))}, {race.created[:16].replace('T', ' ')} UTC."
        st.text(visible(" ".join([sentence, *(f"{item}." for item in removed)])), width="content")
        st.page_link(
            "pages/run.py", label="Back to the lanes", icon=":material/sports_score:", query_params={"race": race_id}
        )
