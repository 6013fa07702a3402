"""How a KV head ranked spans at a step."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREY, SKY, finish, whole_ticks


def ranking(
    frame: pd.DataFrame,
    label: str,
    *,
    chosen_label: str = "chosen",
    unchosen_label: str = "not chosen",
    unit: str = "score (the method's own scale)",
    lines: Mapping[str, float] | None = None,
) -> go.Figure:
    """Scores of the spans a KV head ranked best at a step, best first; chosen ones dark. Columns: span, rank, score,
    chosen, place ('tokens a–b'). label: of the KV head and the step; lines: label -> score, dotted."""
    figure = go.Figure()
    for is_chosen, name, color in ((True, chosen_label, BLUE), (False, unchosen_label, SKY)):
        part = frame[frame["chosen"] == is_chosen]
        hover = [
            f"{rank}. span {span}, {where}: score {score:.4g}"
            for rank, span, where, score in zip(part["rank"], part["span"], part["place"], part["score"], strict=True)
        ]
        figure.add_scatter(
            x=part["rank"],
            y=part["score"],
            mode="markers",
            name=name,
            hovertext=hover,
            hoverinfo="text",
            marker={"color": color, "size": 9},
        )
    for place, (name, value) in enumerate((lines or {}).items()):
        figure.add_hline(y=value, line={"color": GREY, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=1,
            xref="paper",
            y=value,
            text=name,
            showarrow=False,
            yshift=7,
            xshift=-34 * place,
            xanchor="right",
            font={"size": 10},
        )
    finish(figure, 340, uirevision="ranking", legend=True)
    figure.update_layout(
        title_text=f"Spans as {label} ranked them",
        dragmode=False,
        legend={"orientation": "h", "y": -0.3, "yanchor": "top"},
    )
    figure.update_xaxes(
        title_text="rank (1 = best)", range=[0.4, max(1.6, len(frame) + 0.6)], **whole_ticks(len(frame))
    )
    figure.update_yaxes(title_text=unit)
    return figure
