"""What full KV would have read beside what a method read, span by span."""

from __future__ import annotations

import html
import textwrap

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREEN, ORANGE, SELECTED, finish

NEEDLE = "★"
"""marks spans that hold the needle"""


def span_bars(frame: pd.DataFrame, label: str, step: int, selected: int | None) -> go.Figure:
    """Grouped bars per span of one query head at one step, in the order of `frame`: span, reference (full KV's own
    mass, NaN: not recorded), own (own-query mass), mass (the method's), regret, kind, tokens (in words), text, needle
    (bool). The needle's spans carry a star, the selected one a frame.

    Each bar's customdata is its span, so that a click can be read back."""
    names = [
        f"#{span}{f' {NEEDLE}' if needle else ''}" for span, needle in zip(frame["span"], frame["needle"], strict=True)
    ]
    spans = [[int(span)] for span in frame["span"]]
    hover = [_hover(row) for _, row in frame.iterrows()]
    figure = go.Figure()
    for column, name, color, pattern in (
        ("reference", "full KV", ORANGE, "/"),
        ("own", "own query over the exact keys", GREEN, "x"),
        ("mass", "this run", BLUE, ""),
    ):
        figure.add_bar(
            x=names,
            y=frame[column],
            name=name,
            customdata=spans,
            hovertext=hover,
            hoverinfo="text",
            marker={"color": color, "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.2}},
        )
    finish(figure, 310, uirevision=f"bars-{label}", legend=True)
    top = max(0.05, float(frame[["reference", "own", "mass"]].max().max()))
    figure.update_layout(
        title_text=f"What full KV would have read and what {label} read, step {step}",
        barmode="group",
        bargap=0.25,
        bargroupgap=0.05,
        dragmode=False,
        clickmode="event+select",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        margin={"t": 64},
    )
    figure.update_xaxes(
        title_text="span, most wanted first", type="category", showgrid=False, range=[-0.5, len(names) - 0.5]
    )
    figure.update_yaxes(title_text="share of the head's mass", range=[0, min(1.0, top * 1.08)], zeroline=False)
    for place, span in enumerate(frame["span"]):
        if span == selected:
            figure.add_shape(
                type="rect",
                x0=place - 0.46,
                x1=place + 0.46,
                y0=0,
                y1=1,
                yref="y domain",
                line={"color": SELECTED, "width": 2},
            )
    return figure


def _hover(row: pd.Series) -> str:
    text = "<br>".join(textwrap.wrap(html.escape(" ".join(str(row["text"]).split()), quote=False), 70)) or "no text"
    kind, needle = html.escape(str(row["kind"]), quote=False), ", the needle" if row["needle"] else ""
    reference = "not recorded" if pd.isna(row["reference"]) else f"{row['reference']:.4f}"
    return (
        f"<b>span {int(row['span'])}</b> ({kind}), {row['tokens']}{needle}"
        f"<br>full KV {reference}, own query {row['own']:.4f}, this run {row['mass']:.4f}, "
        f"regret {row['regret']:.4f}<br>{text}"
    )
