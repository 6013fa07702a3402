"""What a run lost against full KV, step by step: divergence, and how likely full KV's token still was."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.theme import BLUE, ORANGE, SELECTED, VERMILION, finish, whole_ticks


def loss_track(loss: pd.DataFrame, n_steps: int, step: int) -> go.Figure:
    """Two panels over the decode steps: KL(full KV || run), with a triangle where another token than full KV's is most
    probable, and the log-probability of full KV's token under both. Steps that were not compared are gaps. A line marks
    `step`.

    `loss`: rows of TraceReader.loss, of at least one step."""
    figure = make_subplots(
        2,
        1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        subplot_titles=("KL(full KV ‖ this run) of the next token", "log p of full KV's token"),
    )
    whole = loss.set_index("step").reindex(range(n_steps))
    lost = loss[~loss["agrees"].astype(bool)]
    hover = [
        f"step {row['step']}: KL {_nats(row['kl'])}<br>"
        f"full KV {_shown(row['ref_text'])}, this run {_shown(row['top_text'])}"
        for row in loss.to_dict("records")
    ]
    figure.add_bar(
        x=loss["step"], y=loss["kl"], name="KL", marker={"color": BLUE}, hovertext=hover, hoverinfo="text", row=1, col=1
    )
    figure.add_scatter(
        x=lost["step"],
        y=lost["kl"],
        name="another token is most probable",
        mode="markers",
        hoverinfo="skip",
        marker={"symbol": "triangle-down", "size": 11, "color": VERMILION},
        row=1,
        col=1,
    )
    for column, name, color, dash in (
        ("logprob", "under this run", BLUE, "solid"),
        ("ref_logprob", "under full KV", ORANGE, "dash"),
    ):
        values = whole[column].to_numpy(np.float64)
        figure.add_scatter(
            x=list(range(n_steps)),
            y=values,
            name=name,
            mode="lines+markers",
            connectgaps=False,
            marker={"size": 4},
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate="step %{x}: %{y:.4g} nats",
            row=2,
            col=1,
        )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 2})
    finish(figure, 420, uirevision="loss-track", legend=True)
    figure.update_layout(hovermode="closest", dragmode=False, legend={"orientation": "h", "y": -0.16, "yanchor": "top"})
    figure.update_xaxes(range=[-0.5, n_steps - 0.5], zeroline=False, **whole_ticks(n_steps))
    figure.update_xaxes(title_text="decode step", row=2, col=1)
    figure.update_yaxes(title_text="nats", nticks=4, zeroline=False)
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_annotations(font_size=12)
    return figure


def _shown(token: object) -> str:
    """A token inside hover text, which knows a few tags of its own."""
    return html.escape(repr(str(token)), quote=False)


def _nats(value: float) -> str:
    return "not recorded" if np.isnan(value) else f"{value:.3g} nats"
