"""Where a text is cut into spans: surprisal over tokens with a threshold, the boundaries of segmenters below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.spancolors import UNKNOWN, coloraxis, groups, shown, span_hover
from kvlens.app.figures.spanlanes import Curve, Lane, draw_lane, draw_marks
from kvlens.app.figures.theme import BLUE, ORANGE, PURPLE, finish

LANE_PIXELS, CURVE_PIXELS = 26, 220
MARKED = 1500
"""tokens up to which each has a dot on the line. Of more tokens one dot is drawn, almost invisible; Plotly finds the
others by their places"""


def surprisal_figure(
    curve: Curve,
    table: pd.DataFrame,
    column: str,
    label: str,
    lanes: Sequence[Lane],
    thresholds: Sequence[tuple[float, str]],
    selected: int | None,
) -> go.Figure:
    """Surprisal per token over the strip of the run's own spans and the lanes of other cuts, on one axis of tokens.

    `table`: span, kind, tok_start, tok_end, text and `column`, which colours its bars (`label` names it with its
    unit; the column 'state' has the player's colours). `thresholds`: nats and what each is. Points of the curve and
    bars of the strip carry the id of their span as customdata, so that a click can be read back; a token without a span
    carries -1."""
    rows = 1 + len(lanes)
    figure = make_subplots(
        2, 1, shared_xaxes=True, vertical_spacing=0.02, row_heights=[CURVE_PIXELS, LANE_PIXELS * rows + 8]
    )
    inside = table[(table["tok_end"] > curve.begin) & (table["tok_start"] < curve.stop)]
    _curve(figure, curve, inside)
    top = float(np.nanmax(curve.nats, initial=1.0))
    _edges(figure, inside, top)
    for (nats, subject), (color, dash) in zip(thresholds, ((ORANGE, "dash"), (PURPLE, "dot")), strict=False):
        figure.add_trace(
            go.Scatter(
                x=[curve.begin - 0.5, curve.stop - 0.5],
                y=[nats, nats],
                mode="lines",
                name=subject,
                hovertext=subject,
                hoverinfo="text",
                line={"color": color, "width": 2, "dash": dash},
            ),
            row=1,
            col=1,
        )
    _strip(figure, inside, column, label)
    for row, lane in enumerate(lanes, 1):
        draw_lane(figure, lane, row, curve)
    draw_marks(figure, curve, inside, selected)
    names = ["this run's spans", *(lane.name for lane in lanes)]
    finish(figure, CURVE_PIXELS + LANE_PIXELS * rows + 150, uirevision=f"spans-{curve.begin}-{curve.stop}", legend=True)
    figure.update_layout(
        title_text="Surprisal of each token, and where segmenters cut the text",
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        clickmode="event+select",
        hovermode="closest",
        margin={"l": 220, "t": 74},
        coloraxis=coloraxis(inside, column, label),
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(range=[curve.begin - 0.5, curve.stop - 0.5], showgrid=False, zeroline=False)
    figure.update_xaxes(title_text="token position", row=2, col=1)
    figure.update_yaxes(
        title_text="surprisal (nats)", range=[-0.04 * top, 1.08 * top], fixedrange=True, zeroline=False, row=1, col=1
    )
    figure.update_yaxes(
        tickvals=list(range(rows)),
        ticktext=names,
        range=[rows - 0.5, -0.5],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
        row=2,
        col=1,
    )
    return figure


def _curve(figure: go.Figure, curve: Curve, own_rows: pd.DataFrame) -> None:
    span_of = np.full(len(curve.text), -1, np.int64)
    for span, start, end in zip(own_rows["span"], own_rows["tok_start"], own_rows["tok_end"], strict=True):
        span_of[max(0, start - curve.begin) : max(0, end - curve.begin)] = span
    position = np.arange(curve.begin, curve.stop)
    hover = [
        f"token {index} '{shown(text)}'<br>{'surprisal not recorded' if np.isnan(nats) else f'{nats:.2f} nats'}"
        + ("" if span < 0 else f"<br>span {span}")
        for index, text, nats, span in zip(position, curve.text, curve.nats, span_of, strict=True)
    ]
    many = len(position) > MARKED
    marker = {"size": 3.5, "opacity": 0.004 if many else 0.8, "maxdisplayed": 1 if many else 0}
    same = {"marker": {"opacity": marker["opacity"]}}
    figure.add_trace(
        go.Scatter(
            x=position,
            y=curve.nats,
            mode="lines+markers",
            name="surprisal",
            connectgaps=False,
            hovertext=hover,
            hoverinfo="text",
            line={"color": BLUE, "width": 0.8},
            marker=marker,
            customdata=span_of[:, None],
            selected=same,
            unselected=same,
        ),
        row=1,
        col=1,
    )


def _edges(figure: go.Figure, own_rows: pd.DataFrame, top: float) -> None:
    """Where this run's spans begin, as one path: between two vertical lines it runs below the axis, where nothing of it
    is seen."""
    starts = own_rows["tok_start"].to_numpy(np.float64) - 0.5
    x = np.repeat(starts, 3)
    y = np.tile([-top, 1.04 * top, -top], len(starts))
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            name="boundaries of this run",
            hoverinfo="skip",
            line={"color": "rgba(128,128,128,0.55)", "width": 1},
        ),
        row=1,
        col=1,
    )


def _strip(figure: go.Figure, own_rows: pd.DataFrame, column: str, label: str) -> None:
    same = {"marker": {"opacity": 1.0}}
    for name, part, color in groups(own_rows, column):
        marker: dict[str, object] = {"color": color, "line": {"width": 0.6, "color": "rgba(128,128,128,0.8)"}}
        if isinstance(color, list):
            marker["coloraxis"] = "coloraxis"
        figure.add_trace(
            go.Bar(
                orientation="h",
                base=part["tok_start"] - 0.5,
                x=part["length"],
                y=[0] * len(part),
                width=0.84,
                name=name,
                marker=marker,
                showlegend=column == "state" or name == UNKNOWN,
                customdata=part["span"].to_numpy(np.int64)[:, None],
                hovertext=[span_hover(row, column, label) for row in part.to_dict("records")],
                hoverinfo="text",
                selected=same,
                unselected=same,
            ),
            row=2,
            col=1,
        )
