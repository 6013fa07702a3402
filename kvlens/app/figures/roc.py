"""ROC curves: which signal of a step foresees that the step's token is lost."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, finish
from kvlens.ledger.signals import SIGNALS

COLORS = dict(zip(SIGNALS, (BLUE, VERMILION, GREEN, PURPLE, ORANGE), strict=True))
HEIGHT = 420


def roc_curves(curves: pd.DataFrame, areas: pd.DataFrame) -> go.Figure:
    """Return one curve a signal, its area in the key; the diagonal foresees nothing.

    Args:
        curves: of `kvlens.ledger.foresight.roc`.
        areas: of `kvlens.ledger.foresight.foresight`, as a frame.
    """
    figure = go.Figure()
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "dash": "dot"}, hoverinfo="skip", showlegend=False
    )
    area_of = dict(zip(areas["signal"], areas["auc"], strict=True))
    for signal, points in curves.groupby("signal", sort=False):
        name = str(signal)
        figure.add_scatter(
            x=points["alarms"],
            y=points["caught"],
            mode="lines",
            name=f"{name.replace('_', ' ')} {area_of[name]:.2f}",
            line={"color": COLORS[name], "width": 2},
            customdata=points["threshold"],
            hovertemplate=(
                f"{SIGNALS[name]}<br>at least %{{customdata:.3g}}: %{{y:.0%}} of the lost tokens, "
                "%{x:.0%} of the kept ones"
            ),
        )
    finish(figure, HEIGHT, uirevision="roc", legend=True)
    figure.update_layout(hovermode="closest", legend={"title": {"text": "signal, area under its curve"}})
    figure.update_xaxes(title_text="kept tokens called lost", tickformat=".0%", range=[-0.01, 1.01], zeroline=False)
    figure.update_yaxes(title_text="lost tokens called lost", tickformat=".0%", range=[-0.01, 1.01], zeroline=False)
    return figure
