"""The Spans page: the run's cut of the text beside those of other segmenters, the needle's boundaries, the what-if in
words."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.spans import cuts as spancuts
from kvlens.app.ui.spans.cuts import Cut, Text, Threshold
from kvlens.app.ui.spans.data import View
from kvlens.spans import Span


def cuts_by_surprisal(reader: TraceReader) -> bool:
    """Whether the run's own spans come from a threshold on surprisal."""
    segmenter = spancuts.own_segmenter(reader)
    return segmenter is not None and bool(segmenter.alpha)


def needle(view: View) -> None:
    """A badge per needle: inside one span, or cut."""
    if not view.tokens.needle:
        st.caption("No needle is marked in this run's prompt.")
        return
    edges = {int(edge) for name in ("tok_start", "tok_end") for edge in view.table[name]}
    with st.container(horizontal=True):
        for start, end in view.tokens.needle:
            cut = spancuts.crossed(edges, [(start, end)])
            if cut:
                st.badge(
                    f"Needle, tokens {start}–{end - 1}: crosses {len(cut)} "
                    f"boundar{'y' if len(cut) == 1 else 'ies'} of this run, "
                    f"{plain(spancuts.crossing_text(cut))}",
                    icon=":material/content_cut:",
                    color="orange",
                )
            else:
                st.badge(f"Needle, tokens {start}–{end - 1}: inside one span", icon=":material/check:", color="green")


def what_if(
    reader: TraceReader, view: View, text: Text, rule: Threshold, usual: Cut, preview: Cut | None, threshold: float
) -> None:
    """How the boundaries would move, in words."""
    if preview is None:
        how = " as this run had it" if cuts_by_surprisal(reader) else "; this run did not cut by surprisal"
        st.text(
            f"alpha {usual.name.removeprefix('alpha ')}{how}: threshold {threshold:.2f} nats, {len(usual.spans)} spans."
        )
        return
    removed_edges, come = sorted(usual.edges - preview.edges), sorted(preview.edges - usual.edges)
    inside = spancuts.crossed(preview.edges, view.tokens.needle)
    st.text(
        f"PREVIEW, {preview.name}: threshold {threshold:.2f} nats, {len(preview.spans)} spans instead of "
        f"{len(usual.spans)}; {len(come)} boundaries added{_edge_words(come)}, {len(removed_edges)} "
        f"removed{_edge_words(removed_edges)}. "
        + (
            f"The needle would cross {spancuts.crossing_text(inside)}."
            if inside
            else "No boundary would cross the needle."
            if view.tokens.needle
            else ""
        )
        + _capped(rule, text, [usual, preview])
    )


def _edge_words(edges: list[int]) -> str:
    return f" ({spancuts.crossing_text(edges)})" if edges else ""


def _capped(rule: Threshold, text: Text, cuts: list[Cut]) -> str:
    """Says so where the budget's cap on anchors decides, and not the threshold."""
    cap = rule.most_anchors(text)
    if cap is None or any(sum(span.kind == "anchor" for span in cut.spans) < cap for cut in cuts):
        return ""
    return f" The budget allows {cap} anchors at most; that limit decides here, not the threshold."


def segmenters(reader: TraceReader, view: View, text: Text, cuts: list[Cut]) -> None:
    """All cuts of the text beside each other."""
    st.markdown("##### Segmenters on this text")
    own_spans = [
        Span(int(a), int(b), str(kind), "")
        for a, b, kind in zip(view.table["tok_start"], view.table["tok_end"], view.table["kind"], strict=True)
        if kind != "window"
    ]
    config = reader.meta.config
    own_cut = Cut("this run", tuple(own_spans), ", ".join(f"{key} {value}" for key, value in config.items()))
    rows = []
    for cut in (own_cut, *cuts):
        lengths = [len(span) for span in cut.spans]
        crossed = spancuts.crossed(cut.edges, view.tokens.needle)
        rows.append(
            {
                "segmenter": cut.name,
                "what it is": "recorded" if cut is own_cut else "preview, not this run's spans",
                "spans": len(lengths),
                "mean length (tokens)": float(np.mean(lengths)) if lengths else float("nan"),
                "longest (tokens)": max(lengths, default=0),
                "needle": (
                    "–"
                    if not view.tokens.needle
                    else f"cut at {spancuts.crossing_text(crossed)}"
                    if crossed
                    else "whole"
                ),
                "preset": cut.preset or "this run's",
                "parameters": cut.settings,
            }
        )
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        width="stretch",
        height=38 + 35 * len(rows),
        column_config={
            "mean length (tokens)": st.column_config.NumberColumn(format="%.1f"),
            "needle": st.column_config.TextColumn(width="medium"),
            "parameters": st.column_config.TextColumn(width="large"),
        },
    )
    st.caption(_recut(reader, text))


def _recut(reader: TraceReader, text: Text) -> str:
    """Whether this run's method, asked again, cuts as was recorded."""
    sentence = "The window's tokens, which no span holds, are left out. "
    again = spancuts.own_cut(reader, text)
    if again is None:
        return (
            sentence + "This run's method or one of its parameters is not known here, so its spans were not cut again."
        )
    every = reader.spans()
    prompt_spans = every[(every["born_step"] < 0) & (every["kind"] != "window")]
    recorded = [
        (int(a), int(b), str(kind))
        for a, b, kind in zip(prompt_spans["tok_start"], prompt_spans["tok_end"], prompt_spans["kind"], strict=True)
    ]
    if sorted(recorded) == sorted((span.tok_start, span.tok_end, span.kind) for span in again):
        return (
            sentence
            + f"Cut again by this run's own parameters, the prompt gives the {len(again)} spans that were recorded."
        )
    return sentence + (
        f"Cut again by this run's own parameters, the prompt gives {len(again)} spans, not the {len(recorded)} "
        "recorded spans. Another version made the run, or its parameters were changed."
    )
