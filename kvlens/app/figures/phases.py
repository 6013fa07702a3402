"""Where the time of decode steps went: phases stacked, by step of one run or as means of several runs."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILION, finish

#: Phase -> (name on pages, colour), in the order in which they are stacked.
PHASES = {
    "rest": ("rest of the model", BROWN),
    "attend": ("attend", BLUE),
    "score": ("score", GREEN),
    "plan": ("plan", PURPLE),
    "copy": ("copy", SKY),
    "wait": ("wait", ORANGE),
    "record": ("record", VERMILION),
}


def by_step(frame: pd.DataFrame) -> go.Figure:
    """Stacked bars in ms, one per step. frame: as `TraceReader.phases` gives it."""
    values = {phase: (frame[f"{phase}_us"] / 1000).tolist() for phase in PHASES}
    figure = _stacked([int(step) for step in frame["step"]], values, "step {}", "ms per step")
    figure.update_layout(title_text="Phases of every decode step")
    figure.update_xaxes(title_text="decode step")
    return figure


def by_run(means: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """One stacked bar per run, mean ms per step. means: run -> phase -> microseconds."""
    values = {phase: [each.get(phase, 0.0) / 1000 for each in means.values()] for phase in PHASES}
    figure = _stacked(list(means), values, "{}", "ms per step, mean")
    figure.update_layout(title_text="Phases of a step, mean by run")
    return figure


def _stacked(places: list[int] | list[str], values: Mapping[str, list[float]], where: str, title: str) -> go.Figure:
    figure = go.Figure()
    for phase, (name, color) in PHASES.items():
        hover = [f"{where.format(p)}: {v:.3g} ms {name}" for p, v in zip(places, values[phase], strict=True)]
        marker = {"color": color, "line": {"width": 0}}
        figure.add_bar(x=places, y=values[phase], name=name, hovertext=hover, hoverinfo="text", marker=marker)
    finish(figure, 320, uirevision="phases", legend=True)
    figure.update_layout(barmode="stack", bargap=0.15, dragmode=False)
    figure.update_yaxes(title_text=title, rangemode="tozero")
    return figure
