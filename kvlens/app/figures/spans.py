"""Where a text is cut into spans: surprisal over tokens with a threshold, the boundaries of segmenters below it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.spancolors import UNKNOWN, coloraxis, groups, shown, span_hover
from kvlens.app.figures.theme import BLUE, GREEN, ORANGE, PURPLE, SELECTED, finish
from kvlens.spans import Span

#: Neighbouring spans of a lane, and tokens that are kept as they are: anchors, sinks and what is too short to compress.
LANE_COLORS = ("#7f98b3", "#c2cfdc", ORANGE)
KEPT_KINDS = ("sink", "anchor", "short")
#: More points than this are drawn by WebGL.
SVG_POINTS = 1500
LANE_PIXELS, CURVE_PIXELS = 26, 220


@dataclass(frozen=True)
class Curve:
    """Surprisal of consecutive tokens."""

    first: int
    """position of the first of them"""
    text: Sequence[str]
    nats: np.ndarray
    """[N], NaN: not recorded"""
    needle: Sequence[Sequence[int]]
    """token ranges [start, end)"""

    @property
    def stop(self) -> int:
        return self.first + len(self.text)


@dataclass(frozen=True)
class Lane:
    """A row of spans below the curve."""

    name: str
    spans: Sequence[Span]


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
    inside = table[(table["tok_end"] > curve.first) & (table["tok_start"] < curve.stop)]
    _curve(figure, curve, inside)
    top = float(np.nanmax(curve.nats, initial=1.0))
    _edges(figure, inside, top)
    for (nats, subject), (color, dash) in zip(thresholds, ((ORANGE, "dash"), (PURPLE, "dot")), strict=False):
        kind = _kind(curve)  # a line drawn as SVG would lie under what WebGL draws
        figure.add_trace(
            kind(
                x=[curve.first - 0.5, curve.stop - 0.5],
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
        _lane(figure, lane, row, curve)
    _marks(figure, curve, inside, selected)
    names = ["this run's spans", *(lane.name for lane in lanes)]
    finish(figure, CURVE_PIXELS + LANE_PIXELS * rows + 150, uirevision=f"spans-{curve.first}-{curve.stop}", legend=True)
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
    figure.update_xaxes(range=[curve.first - 0.5, curve.stop - 0.5], showgrid=False, zeroline=False)
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
        span_of[max(0, start - curve.first) : max(0, end - curve.first)] = span
    position = np.arange(curve.first, curve.stop)
    hover = [
        f"token {index} '{shown(text)}'<br>{'surprisal not recorded' if np.isnan(nats) else f'{nats:.2f} nats'}"
        + ("" if span < 0 else f"<br>span {span}")
        for index, text, nats, span in zip(position, curve.text, curve.nats, span_of, strict=True)
    ]
    kind, many = _kind(curve), len(position) > SVG_POINTS
    same = {"marker": {"opacity": 0.8}}
    figure.add_trace(
        kind(
            x=position,
            y=curve.nats,
            mode="markers" if many else "lines+markers",
            name="surprisal",
            connectgaps=False,
            hovertext=hover,
            hoverinfo="text",
            line={"color": BLUE, "width": 0.8},
            marker={"size": 3.5, "opacity": 0.8},
            customdata=[[int(span)] for span in span_of],
            selected=same,
            unselected=same,
        ),
        row=1,
        col=1,
    )


def _kind(curve: Curve) -> type[go.Scatter] | type[go.Scattergl]:
    return go.Scatter if len(curve.text) <= SVG_POINTS else go.Scattergl


def _edges(figure: go.Figure, own_rows: pd.DataFrame, top: float) -> None:
    """Where this run's spans begin, as one trace of vertical lines."""
    starts = own_rows["tok_start"].to_numpy(np.float64) - 0.5
    x = np.stack([starts, starts, np.full_like(starts, np.nan)], axis=1).ravel()
    y = np.tile([0.0, 1.04 * top, np.nan], len(starts))
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            name="boundaries of this run",
            hoverinfo="skip",
            connectgaps=False,
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
                customdata=[[int(span)] for span in part["span"]],
                hovertext=[span_hover(row, column, label) for _, row in part.iterrows()],
                hoverinfo="text",
                selected=same,
                unselected=same,
            ),
            row=2,
            col=1,
        )


def _lane(figure: go.Figure, lane: Lane, row: int, curve: Curve) -> None:
    """A heat map of one row: spans are cells of their own width, so that a lane of thousands stays one picture."""
    spans = [span for span in lane.spans if span.tok_end > curve.first and span.tok_start < curve.stop]
    if not spans:
        return
    codes = [2 if span.kind in KEPT_KINDS else number % 2 for number, span in enumerate(spans)]
    hover = [
        (
            f"{html.escape(lane.name, quote=False)}: {span.kind}, tokens "
            f"{span.tok_start}–{span.tok_end - 1}<br>{shown(span.reason, 110)}"
        )
        for span in spans
    ]
    edges = [span.tok_start - 0.5 for span in spans] + [spans[-1].tok_end - 0.5]
    scale = [(fraction, color) for i, color in enumerate(LANE_COLORS) for fraction in (i / 3, (i + 1) / 3)]
    figure.add_trace(
        go.Heatmap(
            x=edges,
            y=[row - 0.36, row + 0.36],
            z=[codes],
            zmin=-0.5,
            zmax=2.5,
            colorscale=scale,
            showscale=False,
            hovertext=[hover],
            hoverinfo="text",
            name=lane.name,
        ),
        row=2,
        col=1,
    )


def _marks(figure: go.Figure, curve: Curve, own_rows: pd.DataFrame, selected: int | None) -> None:
    """The needle shaded over both panels, the selected span framed."""
    for start, end in curve.needle:
        if end > curve.first and start < curve.stop:
            for row in (1, 2):
                figure.add_vrect(
                    x0=start - 0.5,
                    x1=end - 0.5,
                    fillcolor=GREEN,
                    opacity=0.22 if row == 1 else 0.12,
                    line_width=0,
                    row=row,
                    col=1,
                )
            figure.add_annotation(
                x=(start + end - 1) / 2,
                y=1.0,
                xref="x",
                yref="y domain",
                text="needle",
                showarrow=False,
                yanchor="top",
                font={"color": GREEN, "size": 12},
            )
    for _, span in own_rows[own_rows["span"] == selected].iterrows():
        edge = {"color": SELECTED, "width": 2}
        x0, x1 = float(span["tok_start"]) - 0.5, float(span["tok_end"]) - 0.5
        figure.add_shape(type="rect", x0=x0, x1=x1, y0=-0.46, y1=0.46, line={**edge, "width": 3}, row=2, col=1)
        figure.add_vrect(x0=x0, x1=x1, line=edge, fillcolor="rgba(0,0,0,0)", row=1, col=1)
