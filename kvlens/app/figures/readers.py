"""Masses on a span: how they are called, and their course over the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.theme import SERIES, finish
from kvlens.recording.metrics import Metric

SPAN_MASS = Metric("span_mass", "Mass on the span", "share", "q", 0.0, 1.0, "attention mass on the chosen spans")
SPREAD = Metric("spread", "Spread over prompts", "share", "q", 0.0, None, "standard deviation of the mass over prompts")
TOP = Metric("top_share", "Among the top heads", "share", "q", 0.0, 1.0, "share of prompts, top 10 % of the heads")


def over_steps(curves: Mapping[str, np.ndarray], label: str) -> go.Figure:
    """One line per curve [steps]; gaps where a step was not sampled."""
    figure = go.Figure()
    for color, (name, values) in zip(SERIES, curves.items(), strict=False):
        hover = [f"step {step}: {value:.4f}, {name}" for step, value in enumerate(values)]
        figure.add_scatter(
            y=values, name=name, mode="lines+markers", line={"color": color}, hovertext=hover, hoverinfo="text"
        )
    finish(figure, 240, uirevision="readers", legend=True)
    figure.update_layout(title_text=f"Mass on the span, {label}")
    figure.update_xaxes(title_text="decode step")
    figure.update_yaxes(title_text="share", rangemode="tozero", exponentformat="none")
    return figure
