"""The Spans page: what to look at, and the text with the boundaries of every segmenter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.figures.spanlanes import Curve, Lane
from kvlens.app.figures.spans import surprisal_figure
from kvlens.app.ui.common import session
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.clicks import clicked
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.common.widgets import notice, plain
from kvlens.app.ui.spans import cuts as spancuts
from kvlens.app.ui.spans.compare import cuts_by_surprisal, needle, segmenters, what_if
from kvlens.app.ui.spans.cuts import Cut, Text, Threshold
from kvlens.app.ui.spans.data import COLOURS, Tokens, View, other_cuts, span_table
from kvlens.spans import Surprisal
from kvlens.store.errors import NotRecorded

#: So many tokens are drawn at once.
WIDTH = 4096
#: The slider's ends and step.
ALPHAS = (-1.0, 5.0, 0.05)


def controls(reader: TraceReader, selection: Selection) -> View:
    """Step, layer, query head and colour; the first three are the shared selection's."""
    group = reader.q_heads // reader.kv_heads
    first_column, second, third, fourth, _ = st.columns([2, 2, 2, 3, 3])
    state = st.session_state
    session.follow("spans_step", selection.step or 0)
    session.follow("spans_layer", selection.layer or 0)
    session.follow("spans_head", selection.head or 0)
    first_column.number_input(
        "Step", 0, reader.n_steps - 1, key="spans_step", on_change=lambda: session.change({"step": state["spans_step"]})
    )
    second.selectbox(
        "Layer",
        range(reader.n_layers),
        key="spans_layer",
        on_change=lambda: session.change({"layer": state["spans_layer"]}),
    )
    third.selectbox(
        "Query head",
        range(reader.q_heads),
        key="spans_head",
        format_func=lambda head: f"Q{head} (KV{head // group})",
        on_change=lambda: session.change({"head": state["spans_head"]}),
    )
    if "spans_colour" not in state:
        requested = st.query_params.get("color", "mass")
        if requested not in COLOURS:
            notice([f"spans cannot be coloured by {requested[:40]!r}; showing mass"])
        state["spans_colour"] = requested if requested in COLOURS else "mass"
    column = fourth.selectbox(
        "Colour of spans",
        list(COLOURS),
        key="spans_colour",
        format_func=lambda name: COLOURS[name],
        persist_state="session",
    )
    frame = reader.tokens()
    tokens = Tokens.read(reader, frame)
    return View(selection, str(column), frame, tokens, span_table(reader, tokens, frame, selection))


def boundaries(reader: TraceReader, view: View) -> dict[str, str]:
    """The text with every cut of it, badges about the needle, the table of segmenters, the what-if; returns URL
    parameters."""
    try:
        text = Text.read(reader, view.frame)
    except NotRecorded as problem:
        st.info(plain(f"Only this run's own spans are drawn. {problem}"))
        _draw(reader, view, [], [])
        return {}
    try:
        stats, rest = text.stats, other_cuts(reader, reader.uid, reader.stamp)
    except ValueError as problem:
        why = _no_surprisals(reader, text) or problem
        st.info(plain(f"Only this run's own spans are drawn: {why}, so other segmenters cannot cut this text."))
        _draw(reader, view, [], [])
        return {}
    rule = Threshold.choose(reader, text)
    cuts = [cut for cut in rest if not spancuts.is_own(reader, cut)]
    if rule is None:
        _draw(reader, view, cuts, [])
        needle(view)
        segmenters(reader, view, text, cuts)
        return {}
    place, alpha = st.container(), _alpha(reader, rule)
    usual = rule.cut(text, rule.alpha)
    shown = rule.alpha if alpha is None else alpha
    preview = None if shown == rule.alpha else rule.cut(text, shown)
    lines = [_threshold(stats, rule.alpha, cuts_by_surprisal(reader))]
    if preview is not None:
        lines.append(_threshold(stats, shown, False))
    lanes = [] if preview is None else [replace(preview, name=f"PREVIEW: alpha {shown:g}")]
    with place:
        _draw(reader, view, [*lanes, *cuts], lines)
        needle(view)
    what_if(reader, view, text, rule, usual, preview, stats.threshold(shown))
    segmenters(reader, view, text, [*lanes, *cuts])
    return {} if preview is None else {"alpha": f"{shown:g}"}


def _no_surprisals(reader: TraceReader, text: Text) -> str:
    """Why no token of the prompt has a surprisal; empty where one has."""
    if np.isfinite(text.surprisal).any():
        return ""
    why = reader.meta.no_surprisal or ("" if reader.status == "completed" else "the run did not come to its end")
    return "the surprisals of the prompt's tokens were not recorded" + (why and f" ({why})")


def _threshold(stats: Surprisal, alpha: float, of_run: bool) -> tuple[float, str]:
    """The threshold in nats, and what it is made of; one that the run did not cut by is a preview."""
    nats = stats.threshold(alpha)
    made_of = f"mean {stats.mu:.2f}, deviation {stats.sigma:.2f}, alpha {alpha:g}"
    return nats, f"{'' if of_run else 'PREVIEW '}threshold {nats:.2f} nats: {made_of}"


def _alpha(reader: TraceReader, rule: Threshold) -> float | None:
    """The slider; None while it has not been moved away from the run's own alpha."""
    st.markdown("##### What if the threshold were another?")
    st.caption(
        "A preview: the entropy rule cuts the recorded surprisals again, and nothing is run. The model's answer under "
        "these cuts is not known. The threshold is mean + alpha × standard deviation of the prompt's surprisals."
    )
    key = f"spans_alpha_{reader.uid}"
    low, high, step = min(ALPHAS[0], rule.alpha), max(ALPHAS[1], rule.alpha), ALPHAS[2]
    if key not in st.session_state:
        requested = _number(st.query_params.get("alpha"), rule.alpha)
        st.session_state[key] = min(high, max(low, requested))
    value = float(st.slider("alpha (preview)", low, high, step=step, key=key, persist_state="session"))
    return None if abs(value - rule.alpha) < 1e-9 else value


def _number(text: str | None, otherwise: float) -> float:
    """A number from the URL; said on the page where it is none."""
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        notice([f"alpha {text[:40]!r} is not a number; showing {otherwise:g}"])
        return otherwise
    return value


def _draw(reader: TraceReader, view: View, cuts: list[Cut], thresholds: list[tuple[float, str]]) -> None:
    first_token, stop = _range(reader, view)
    tokens = view.tokens
    curve = Curve(first_token, tokens.text[first_token:stop], tokens.nats[first_token:stop], tokens.needle)
    lanes = [Lane(cut.name, cut.spans) for cut in cuts]
    key = "spans_boundaries"
    chart(
        surprisal_figure(curve, view.table, view.column, COLOURS[view.column], lanes, thresholds, view.selected),
        boundary_frame(view.table, cuts),
        f"{reader.uid}-boundaries",
        key,
        "Surprisal by token, and the boundaries of every segmenter",
        on_select=lambda: span_clicked(key),
    )
    st.caption(
        plain(
            "Click a token or a bar of the first strip to select its span. Drag to zoom, double-click to return. The "
            f"first strip has this run's spans at step {view.chosen.step or 0}, coloured by {COLOURS[view.column]} of "
            "the selected head. The lanes below it are previews: other segmenters cut the same text (parameters in "
            "the table below). Orange in a lane: sinks, anchors and pieces too short to be compressed."
        )
    )


def _range(reader: TraceReader, view: View) -> tuple[int, int]:
    """Tokens [first, stop) to draw: all, or WIDTH of them from where the slider says."""
    size = len(view.tokens.text)
    if size <= WIDTH:
        return 0, size
    key, last = f"spans_first_{reader.uid}", size - WIDTH
    if key not in st.session_state:
        selected_start = view.table.loc[view.table["span"] == view.selected, "tok_start"]
        about = (
            int(selected_start.iloc[0])
            if len(selected_start)
            else view.tokens.needle[0][0]
            if view.tokens.needle
            else 0
        )
        st.session_state[key] = min(last, max(0, about - WIDTH // 2))
    first_token = int(
        st.slider(f"First of the {WIDTH:,} tokens drawn, of {size:,}", 0, last, key=key, persist_state="session")
    )
    return first_token, first_token + WIDTH


def span_clicked(key: str) -> None:
    """A click on a token or span drawn under `key` selects its span on every page."""
    results = clicked(key)
    if len(results) == 1:
        session.change({"span": results[0]})


def boundary_frame(table: pd.DataFrame, cuts: list[Cut]) -> pd.DataFrame:
    """All spans of the chart, one row each: segmenter, of_this_run, kind, tok_start, tok_end, reason."""
    own_value = table.assign(segmenter="this run", of_this_run=True)
    rows = [(cut.name, False, s.kind, s.tok_start, s.tok_end, s.reason) for cut in cuts for s in cut.spans]
    names = ["segmenter", "of_this_run", "kind", "tok_start", "tok_end", "reason"]
    return pd.concat([own_value[names], pd.DataFrame(rows, columns=names)], ignore_index=True)
