"""Spans as points of a plane: principal components of vectors, and the picture of any such map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.spancolors import UNKNOWN, coloraxis, groups, span_hover
from kvlens.app.figures.theme import GREEN, SELECTED, finish

SVG_POINTS = 2500
"""points up to which a map is SVG; more are drawn by WebGL, which takes longer to begin"""


def pca(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """vectors [S, D] -> (the first two principal components [S, 2], the shares of the variance they have [2]).

    In float64. The sign of a component is arbitrary: here its largest loading is positive. What does not exist (fewer
    than three vectors or one dimension, no variance at all) is 0."""
    centred = np.asarray(vectors, np.float64)
    centred = centred - centred.mean(axis=0, keepdims=True) if len(centred) else centred
    points, shares = np.zeros((len(centred), 2)), np.zeros(2)
    if min(centred.shape) == 0 or not centred.any():
        return points, shares
    squares, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    for k in range(min(2, *centred.shape)):
        direction = directions[:, -1 - k]
        sign = 1.0 if direction[np.abs(direction).argmax()] >= 0 else -1.0
        points[:, k] = sign * (centred @ direction)
        shares[k] = max(0.0, squares[-1 - k]) / squares.sum()
    return points, shares


def projection_figure(
    points: pd.DataFrame,
    axes: tuple[str, str],
    column: str,
    label: str,
    selected: int | None,
    title: str,
    needle: Sequence[int],
    equal: bool,
) -> go.Figure:
    """Spans as points. `points`: x, y, span, kind, tok_start, tok_end, text and `column`, by which they are coloured as
    on the strip of spans (`label` names it with its unit). A star marks the spans `needle`, a ring the selected one.
    `equal`: both axes have one scale, as distances want it. Points carry their span's id."""
    figure = go.Figure()
    kind = go.Scattergl if len(points) > SVG_POINTS else go.Scatter
    for name, part, color in groups(points, column):
        marker: dict[str, object] = {"color": color, "size": 10, "line": {"width": 1, "color": "rgba(128,128,128,0.9)"}}
        if isinstance(color, list):
            marker["coloraxis"] = "coloraxis"
        same = {"marker": {"opacity": 1.0}}
        points_drawn = kind(
            x=part["x"],
            y=part["y"],
            mode="markers",
            name=name,
            marker=marker,
            customdata=part["span"].to_numpy(np.int64)[:, None],
            hovertext=[span_hover(row, column, label) for row in part.to_dict("records")],
            hoverinfo="text",
            selected=same,
            unselected=same,
            showlegend=column == "state" or name == UNKNOWN,
        )
        figure.add_trace(points_drawn)
    marks = (
        (
            "holds the needle",
            points["span"].isin(needle),
            {"symbol": "star-open", "size": 20, "color": GREEN, "line": {"width": 3}},
        ),
        (
            "selected span",
            points["span"] == selected,
            {"symbol": "circle-open", "size": 24, "color": SELECTED, "line": {"width": 3}},
        ),
    )
    for name, which, marker in marks:  # drawn last, over all points; a click goes through to the point below
        figure.add_scatter(
            x=points.loc[which, "x"],
            y=points.loc[which, "y"],
            mode="markers",
            hoverinfo="skip",
            name=name,
            marker=marker,
            showlegend=bool(which.any()),
        )
    finish(figure, 420, uirevision=f"projection-{title}", legend=True)
    figure.update_layout(
        title_text=title,
        clickmode="event+select",
        dragmode="pan",
        hovermode="closest",
        coloraxis=coloraxis(points, column, label),
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
    figure.update_xaxes(title_text=axes[0], zeroline=False)
    figure.update_yaxes(title_text=axes[1], zeroline=False, scaleanchor="x" if equal else None)
    return figure
