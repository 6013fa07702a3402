"""Lanes of spans: one row of coloured stretches per kind, with its marks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.spancolors import shown
from kvlens.app.figures.theme import GREEN, ORANGE, SELECTED
from kvlens.spans import Span

#: Neighbouring spans of a lane, and tokens that are kept as they are: anchors, sinks and what is too short to compress.
LANE_COLORS = ("#7f98b3", "#c2cfdc", ORANGE)


KEPT_KINDS = ("sink", "anchor", "short")


@dataclass(frozen=True)
class Curve:
    """Surprisal of consecutive tokens."""

    begin: int
    """position of the first of them"""
    text: Sequence[str]
    nats: np.ndarray
    """[N], NaN: not recorded"""
    needle: Sequence[Sequence[int]]
    """token ranges [start, end)"""

    @property
    def stop(self) -> int:
        return self.begin + len(self.text)


@dataclass(frozen=True)
class Lane:
    """A row of spans below the curve."""

    name: str
    spans: Sequence[Span]


def draw_lane(figure: go.Figure, lane: Lane, row: int, curve: Curve) -> None:
    """A heat map of one row: spans are cells of their own width, so that a lane of thousands stays one picture."""
    spans = [span for span in lane.spans if span.tok_end > curve.begin and span.tok_start < curve.stop]
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


def draw_marks(figure: go.Figure, curve: Curve, own_rows: pd.DataFrame, selected: int | None) -> None:
    """The needle shaded over both panels, the selected span framed."""
    for start, end in curve.needle:
        if end > curve.begin and start < curve.stop:
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
