"""What rankings of tokens dropped for good: how much of every span each KV head lost, and where the line was drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.theme import BLUE, GREY, ORANGE, VERMILION, finish

_SCORE = "score (the method's own scale)"


def dropped_map(share: np.ndarray, rows: list[str], spans: list[int]) -> go.Figure:
    """Map of the share of tokens dropped, float [rows, spans], 0 where nothing was; a row per layer and KV head."""
    figure = go.Figure(
        go.Heatmap(
            z=share,
            x=[str(span) for span in spans],
            y=rows,
            zmin=0.0,
            zmax=1.0,
            colorscale="Cividis",
            hovertemplate="%{y}, span %{x}: %{z:.0%} of its tokens evicted<extra></extra>",
            colorbar={
                "title": {"text": "tokens evicted (share)", "side": "right"},
                "thickness": 12,
                "tickformat": ".0%",
            },
        )
    )
    finish(figure, 170 + int(np.clip(len(rows) * 16, 120, 460)), uirevision="cuts-map")
    figure.update_layout(title_text="Share of each span's tokens that was evicted", dragmode=False)
    figure.update_xaxes(title_text="span, by first token", type="category", showgrid=False, nticks=20)
    figure.update_yaxes(title_text="layer, KV head", type="category", autorange="reversed", showgrid=False, nticks=16)
    return figure


def span_cuts(table: pd.DataFrame, label: str) -> go.Figure:
    """One KV head: tokens kept and dropped of every span, and beneath the score of the best token dropped against the
    lowest that stayed. table, a row per span by first token: span, tokens, dropped, score, cut (NaN: none)."""
    scored = bool(table["score"].notna().any())
    figure = make_subplots(2 if scored else 1, 1, shared_xaxes=True, vertical_spacing=0.08)
    names = [str(span) for span in table["span"]]
    kept_tokens = table["tokens"] - table["dropped"]
    for values, name, color, pattern in ((kept_tokens, "kept", BLUE, ""), (table["dropped"], "evicted", ORANGE, "/")):
        figure.add_bar(
            x=names,
            y=values,
            name=name,
            marker={"color": color, "pattern": {"shape": pattern, "size": 6, "solidity": 0.2}},
            hovertemplate=f"span %{{x}}: %{{y}} tokens {name}<extra></extra>",
            row=1,
            col=1,
        )
    figure.update_yaxes(title_text="tokens", row=1, col=1)
    if scored:
        figure.add_scatter(
            x=names,
            y=table["score"],
            name="best token evicted",
            mode="markers",
            marker={"color": VERMILION, "size": 7, "symbol": "x"},
            hovertemplate="span %{x}: best token evicted scored %{y:.4g}<extra></extra>",
            row=2,
            col=1,
        )
        figure.add_scatter(
            x=names,
            y=table["cut"],
            name="the cut: lowest score that stayed",
            mode="lines",
            line={"color": GREY, "dash": "dash", "width": 2},
            hovertemplate="lowest score that stayed %{y:.4g}<extra></extra>",
            row=2,
            col=1,
        )
        figure.update_yaxes(title_text=_SCORE, row=2, col=1)
    finish(figure, 460 if scored else 300, uirevision=f"cuts-{label}", legend=True)
    figure.update_layout(
        title_text=f"What {label} kept of each span, and the line of the cut",
        barmode="stack",
        dragmode=False,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
    figure.update_xaxes(type="category", showgrid=False, nticks=20)
    figure.update_xaxes(title_text="span, by first token", row=2 if scored else 1, col=1)
    return figure


def step_cuts(table: pd.DataFrame, label: str) -> go.Figure:
    """One KV head that evicts while it decodes: the score of the token that went at each step against the lowest that
    stayed. table: step, pos, score, cut."""
    figure = go.Figure()
    for column, name, color, dash in (
        ("score", "token evicted", VERMILION, "solid"),
        ("cut", "lowest that stayed", GREY, "dash"),
    ):
        figure.add_scatter(
            x=table["step"],
            y=table[column],
            name=name,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 1.8},
            marker={"size": 5},
            hovertext=[
                f"step {step}: token {pos} went; {name}: {value:.4g}"
                for step, pos, value in zip(table["step"], table["pos"], table[column], strict=True)
            ],
            hoverinfo="text",
        )
    finish(figure, 320, uirevision=f"step-cuts-{label}", legend=True)
    figure.update_layout(title_text=f"What {label} evicted while decoding", dragmode=False, hovermode="closest")
    figure.update_xaxes(title_text="decode step")
    figure.update_yaxes(title_text=_SCORE)
    return figure
