"""How long a text's spans are."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SELECTED, SKY, finish


def length_histogram(lengths: np.ndarray, kinds: Sequence[str], selected: int | None) -> go.Figure:
    """How many spans have how many tokens, one colour per kind; a line marks the selected span's length."""
    figure = go.Figure()
    most = int(lengths.max(initial=1))
    size = max(1, -(-most // 40))
    names = np.asarray(kinds, dtype=object)
    for kind, color in zip(sorted(set(kinds)), (BLUE, ORANGE, GREEN, GREY, PURPLE, SKY) * 9, strict=False):
        kind_lengths = lengths[names == kind]
        figure.add_histogram(
            x=kind_lengths,
            name=f"{html.escape(kind, quote=False)} ({len(kind_lengths)})",
            marker={"color": color},
            xbins={"start": 0.5, "end": most + size + 0.5, "size": size},
            hovertemplate="%{x} tokens: %{y} spans<extra></extra>",
        )
    if selected is not None:
        figure.add_vline(x=selected, line={"color": SELECTED, "width": 2})
    finish(figure, 420, uirevision="span-lengths", legend=True)
    figure.update_layout(
        title_text=f"Lengths of {len(lengths)} spans",
        barmode="stack",
        bargap=0.05,
        dragmode=False,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
    figure.update_xaxes(title_text="tokens of a span", range=[0, most + size + 0.5])
    figure.update_yaxes(title_text="spans", rangemode="tozero")
    return figure
