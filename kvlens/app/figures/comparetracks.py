"""Quantities of several runs over the decode steps, laid over each other, one panel each."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.compare import value_of
from kvlens.app.figures.methodmarks import DASHES, mark
from kvlens.app.figures.theme import BLUE, ORANGE, SELECTED, finish, whole_ticks


@dataclass(frozen=True)
class Track:
    """One quantity of several runs."""

    title: str
    unit: str
    values: tuple[np.ndarray, ...]
    """[steps of that run] each, in the runs' order; NaN = not recorded"""


@dataclass(frozen=True)
class Line:
    """How a run's curves look."""

    name: str
    color: str
    dash: str


A_AND_B = (Line("A", BLUE, "solid"), Line("B", ORANGE, "dash"))
"""two runs beside each other, as the page's view of two runs draws them"""


def lines_of(names: Sequence[str], methods: Sequence[str]) -> list[Line]:
    """Each run in its method's colour; runs that share one differ in their dash."""
    taken_keys: set[tuple[str, str]] = set()
    lines = []
    for name, method in zip(names, methods, strict=True):
        look = mark(method)
        free = [dash for dash in (look.dash, *DASHES) if (look.color, dash) not in taken_keys]
        dash = free[0] if free else look.dash
        taken_keys.add((look.color, dash))
        lines.append(Line(name, look.color, dash))
    return lines


def overlaid(tracks: Sequence[Track], lines: Sequence[Line], step: int, divergence: int | None) -> go.Figure:
    """A panel per track with a curve per run, one cursor at `step`; what lies after `divergence`, where the contexts
    differ, is shaded."""
    figure = make_subplots(
        len(tracks), 1, shared_xaxes=True, vertical_spacing=0.07, subplot_titles=[track.title for track in tracks]
    )
    last = max([0.5, *(values.size - 0.5 for track in tracks for values in track.values)])
    for row, track in enumerate(tracks, 1):
        for line, values in zip(lines, track.values, strict=True):
            figure.add_scatter(
                x=list(range(values.size)),
                y=values,
                name=html.escape(line.name),
                legendgroup=line.name,
                showlegend=row == 1,
                connectgaps=False,
                hoverinfo="text",
                mode="lines+markers" if values.size < 100 else "lines",
                marker={"size": 4},
                row=row,
                col=1,
                line={"color": line.color, "width": 2, "dash": line.dash},
                hovertext=[
                    f"{html.escape(line.name)}, step {index}: {value_of(float(value), track.unit)}"
                    for index, value in enumerate(values)
                ],
            )
        _scale(figure, track, row)
    if divergence is not None and divergence + 0.5 < last:
        figure.add_vrect(x0=divergence + 0.5, x1=last, fillcolor="#888888", opacity=0.16, line_width=0)
        figure.add_annotation(
            text="different contexts",
            x=last,
            y=1,
            yref="paper",
            xanchor="right",
            yanchor="bottom",
            showarrow=False,
            font={"size": 11},
        )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 2})
    finish(figure, 110 + 120 * len(tracks), uirevision="compare-tracks", legend=True)
    figure.update_layout(
        hovermode="closest",
        dragmode=False,
        margin={"t": 48},
        legend={"orientation": "h", "x": 0, "y": -0.09 - 0.1 / len(tracks), "yanchor": "top"},
    )
    figure.update_xaxes(range=[-0.5, last], zeroline=False, **whole_ticks(round(last)))
    figure.update_xaxes(title_text="decode step", row=len(tracks), col=1)
    figure.update_annotations(font_size=12)
    return figure


def _scale(figure: go.Figure, track: Track, row: int) -> None:
    axis = {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"} if track.unit == "bytes" else {}
    figure.update_yaxes(title_text=track.unit, row=row, col=1, nticks=4, **axis)
    if track.unit == "bytes" and not any(np.nan_to_num(values).any() for values in track.values):
        figure.update_yaxes(range=[-0.05, 1], tickvals=[0], row=row, col=1)
    if not any(np.isfinite(values).any() for values in track.values):
        figure.add_annotation(
            text="not recorded in any of these runs",
            x=0.5,
            y=0.5,
            xref="x domain",
            yref="y domain",
            showarrow=False,
            row=row,
            col=1,
        )


def track_table(tracks: Sequence[Track], lines: Sequence[Line]) -> pd.DataFrame:
    """What `overlaid` draws: one row per quantity, run and step; the unit is a column, as it differs from row to
    row."""
    parts = [
        pd.DataFrame(
            {
                "quantity": track.title,
                "run": line.name,
                "step": np.arange(values.size),
                "amount": values,
                "unit": track.unit,
            }
        )
        for track in tracks
        for line, values in zip(lines, track.values, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)
