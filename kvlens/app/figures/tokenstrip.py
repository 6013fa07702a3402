"""A strip of tokens, coloured by a score."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.theme import PURPLE, finish


def token_strip(
    retained: np.ndarray,
    scores: np.ndarray | None,
    first_position: int,
    texts: Sequence[str],
    needles: Sequence[tuple[int, int]],
) -> go.Figure:
    """A few tokens with their texts: per layer (row) what was kept. retained: [L, m], positions from `first_position`
    on, scores [L, m] or None; texts: of these m tokens."""
    layers, m = retained.shape
    hover = []
    for row in range(layers):
        line = []
        for i in range(m):
            score = (
                "no score (window)"
                if scores is None or not np.isfinite(scores[row, i])
                else f"score {scores[row, i]:.4g}"
            )
            state = "kept" if retained[row, i] else "dropped"
            line.append(f"layer {row}, position {first_position + i}, {shown_token(texts[i])}<br>{state}, {score}")
        hover.append(line)
    figure = go.Figure(
        go.Heatmap(
            z=retained,
            x=list(range(m)),
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            text=hover,
            hoverinfo="text",
            xgap=1,
            ygap=1,
            showscale=False,
        )
    )
    for start, end in needles:
        a, b = max(start, first_position), min(end, first_position + m)
        if a < b:
            figure.add_shape(
                type="rect",
                x0=a - first_position - 0.5,
                x1=b - first_position - 0.5,
                y0=-0.5,
                y1=layers - 0.5,
                line={"color": MARK, "width": 2},
            )
    finish(figure, 210 + int(np.clip(layers * 22, 130, 480)), uirevision="token-strip")
    figure.update_layout(
        title_text=f"Positions {first_position} to {first_position + m - 1}: yellow kept, blue dropped",
        dragmode=False,
        margin={"b": 110},
    )
    figure.update_xaxes(
        tickvals=list(range(m)),
        ticktext=[shown_token(text) for text in texts],
        tickangle=-60,
        showgrid=False,
        zeroline=False,
        title_text="prompt token",
        tickfont={"family": "monospace", "size": 11},
    )
    figure.update_yaxes(
        title_text="layer",
        range=[layers - 0.5, -0.5],
        tickvals=list(range(0, layers, max(1, layers // 16))),
        showgrid=False,
        zeroline=False,
    )
    return figure


#: Outlines of what is pointed out: heads that chose, the needle, the limits of a layer's budget.
MARK = PURPLE


def shown_token(text: str) -> str:
    """A token's text so that spaces and line ends are seen, and nothing of it is read as markup."""
    short = text if len(text) <= 24 else f"{text[:23]}…"
    return html.escape(short.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥"), quote=False)
