"""The loss ledger as stacked bars: one bar a label, one colour a cause."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, BROWN, GREY, ORANGE, PURPLE, SKY, VERMILION, finish
from kvlens.ledger.causes import CAUSES, NAMES, REST

COLORS = {
    "not_asked": BLUE,
    "refused": ORANGE,
    "precision": SKY,
    "stale": PURPLE,
    "evicted_before": BROWN,
    "evicted_after": VERMILION,
    REST: GREY,
}
BAR = 34
"""pixels of one bar with its gap"""


def ledger_bars(pooled: pd.DataFrame, logits: bool = False) -> go.Figure:
    """Return one horizontal bar per label, from kvlens.ledger.pooled.pooled. logits: lengths are logits, else shares of
    the lost lead. A cause that took less than nothing goes to the left of zero."""
    figure = go.Figure()
    labels = list(dict.fromkeys(pooled["label"]))
    for cause in (*CAUSES, REST):
        part = pooled[pooled["cause"] == cause]
        if part.empty:
            continue
        meaning = CAUSES[cause][1] if cause in CAUSES else "what no repair brings back"
        figure.add_bar(
            x=part["logits" if logits else "share"],
            y=part["label"],
            orientation="h",
            name=NAMES[cause],
            marker={"color": COLORS[cause], "line": {"width": 0}},
            customdata=part[["share", "logits", "n"]].to_numpy(),
            hovertemplate=(
                f"%{{y}}<br><b>{NAMES[cause]}</b>: %{{customdata[0]:.1%}} of the lost lead, "
                f"%{{customdata[1]:.2f}} logits<br>{meaning}<br>n = %{{customdata[2]}}<extra></extra>"
            ),
        )
    finish(figure, 110 + BAR * max(1, len(labels)), uirevision="ledger", legend=True)
    figure.update_layout(barmode="relative", bargap=0.25, dragmode=False)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"})
    title = "lead lost (logits)" if logits else "share of the lead lost, mean over the lost answers"
    figure.update_xaxes(title_text=title, tickformat=None if logits else ".0%")
    figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1], title_text=None)
    return figure
