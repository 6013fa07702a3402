"""Quantities of two runs over the decode steps, laid over each other, one panel each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.figures.compare import value_of
from kvlens.figures.theme import BLUE, ORANGE, SELECTED, finish


@dataclass(frozen=True)
class Track:
    """One quantity of two runs. Arrays are [steps of that run]; NaN = not recorded."""

    title: str
    unit: str
    a: np.ndarray
    b: np.ndarray


def overlaid(tracks: list[Track], step: int, divergence: int | None) -> go.Figure:
    """A panel per track with A (blue, solid) and B (orange, dashed), one cursor at `step`; what lies after
    `divergence`, where the contexts differ, is shaded."""
    figure = make_subplots(
        len(tracks), 1, shared_xaxes=True, vertical_spacing=0.07, subplot_titles=[track.title for track in tracks]
    )
    last = max([0.5, *(max(track.a.size, track.b.size) - 0.5 for track in tracks)])
    for row, track in enumerate(tracks, 1):
        for name, values, color, dash in (("A", track.a, BLUE, "solid"), ("B", track.b, ORANGE, "dash")):
            steps = list(range(values.size))
            figure.add_scatter(
                x=steps,
                y=values,
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                connectgaps=False,
                hoverinfo="text",
                mode="lines+markers" if values.size < 100 else "lines",
                marker={"size": 4},
                row=row,
                col=1,
                line={"color": color, "width": 2, "dash": dash},
                hovertext=[
                    f"{name}, step {at}: {value_of(float(v), track.unit)}" for at, v in zip(steps, values, strict=True)
                ],
            )
        axis = {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"} if track.unit == "bytes" else {}
        figure.update_yaxes(title_text=track.unit, row=row, col=1, nticks=4, **axis)
        if track.unit == "bytes" and not (np.nan_to_num(track.a).any() or np.nan_to_num(track.b).any()):
            figure.update_yaxes(range=[-0.05, 1], tickvals=[0], row=row, col=1)
        if not (np.isfinite(track.a).any() or np.isfinite(track.b).any()):
            figure.add_annotation(
                text="not recorded in either run",
                x=0.5,
                y=0.5,
                xref="x domain",
                yref="y domain",
                showarrow=False,
                row=row,
                col=1,
            )
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
    figure.update_xaxes(range=[-0.5, last], zeroline=False)
    figure.update_xaxes(title_text="decode step", row=len(tracks), col=1)
    figure.update_annotations(font_size=12)
    return figure


def track_table(tracks: list[Track]) -> pd.DataFrame:
    """What `overlaid` draws: one row per quantity, run and step; the unit is a column, as it differs from row to
    row."""
    parts = [
        pd.DataFrame(
            {"quantity": track.title, "run": name, "step": np.arange(values.size), "amount": values, "unit": track.unit}
        )
        for track in tracks
        for name, values in (("A", track.a), ("B", track.b))
    ]
    return pd.concat(parts, ignore_index=True)
