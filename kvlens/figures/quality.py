"""Quality tables as figures: exact match against budget, attended tokens or bytes, with intervals. Lines as kvlens.bench.quality
writes them; no Streamlit, no files."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.figures.metrics import si_bytes
from kvlens.figures.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, finish

#: One colour per method on every figure; a method this version does not know is grey.
METHOD_COLORS = {
    "full": "#444444", "streaming_llm": GREY, "sekv": VERMILION, "chess": PURPLE, "freekv": BLUE, "sentkv": GREEN, "compresskv": ORANGE,
}  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x")

#: What the horizontal axis may show: column -> (title, is a share).
AXES = {
    "resident_share": ("Peak bytes on the device, share of full KV", True),
    "attended_share": ("Attended tokens per step, share of the prompt", True),
    "h2d_bytes_per_step": ("Bytes moved to the device per step", False),
    "coverage": ("Coverage: full attention's mass on tokens attended exactly", True),
}


def table(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """Lines as rows; methods, tasks and budgets in their order; columns that no line has are NaN."""
    columns = (
        "method", "budget", "task", "rule", "n", "infeasible", "smallest_feasible", "exact", "low", "high", "score", "coverage",
        "attended_tokens", "attended_share", "resident_share", "h2d_bytes_per_step", "d2h_bytes_per_step",
    )  # fmt: skip
    return pd.DataFrame([{column: line.get(column) for column in columns} for line in lines])


def quality(frame: pd.DataFrame, axis: str, titles: dict[str, str]) -> go.Figure:
    """Exact match with 95 % Wilson intervals against one of AXES: a panel per task, a line per method, a point per budget.

    `titles`: method -> its title. Budgets that were infeasible for every prompt have no point.
    """
    tasks = list(dict.fromkeys(frame["task"]))
    title, share = AXES[axis]
    figure = make_subplots(1, len(tasks), shared_yaxes=True, subplot_titles=tasks, horizontal_spacing=0.03)
    for place, name in enumerate(dict.fromkeys(frame["method"])):
        for column, task in enumerate(tasks, 1):
            part = frame[(frame["method"] == name) & (frame["task"] == task) & frame["exact"].notna()].sort_values(axis)
            if part.empty:
                continue
            color = METHOD_COLORS.get(str(name), SKY)
            figure.add_scatter(
                x=part[axis], y=part["exact"], name=titles.get(str(name), str(name)), legendgroup=str(name), showlegend=column == 1,
                mode="lines+markers", line={"color": color, "width": 1.5}, hovertext=[_hover(row, titles) for _, row in part.iterrows()],
                marker={"color": color, "symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9}, hoverinfo="text",
                error_y={
                    "type": "data", "symmetric": False, "array": part["high"] - part["exact"],
                    "arrayminus": part["exact"] - part["low"], "thickness": 1, "width": 3, "color": color,
                },
                row=1, col=column,
            )  # fmt: skip
    finish(figure, 420, uirevision=f"quality-{axis}", legend=True)
    figure.update_layout(legend={"orientation": "h", "y": -0.24, "yanchor": "top"}, hovermode="closest", margin={"t": 56})
    figure.update_yaxes(range=[-0.04, 1.06], zeroline=False)
    figure.update_yaxes(title_text="exact match (share of prompts)", col=1)
    figure.update_xaxes(tickformat=".0%" if share else "~s", ticksuffix="" if share else "B", rangemode="tozero", zeroline=False)
    figure.update_xaxes(title_text=title, col=(len(tasks) + 1) // 2)
    return figure


def _hover(row: pd.Series, titles: dict[str, str]) -> str:
    parts = [
        f"{titles.get(str(row['method']), row['method'])}, {row['budget'] or 'no limit'}" + (f" of {row['rule']}" if row["budget"] else ""),
        f"exact {row['exact']:.2f} ({row['low']:.2f} to {row['high']:.2f}), n = {int(row['n'])}",
        f"coverage {row['coverage']:.2f}, attended {row['attended_share']:.1%}, resident {row['resident_share']:.1%}",
        f"to device {si_bytes(row['h2d_bytes_per_step'])} per step",
    ]
    if row["infeasible"]:
        parts.append(f"{int(row['infeasible'])} more prompts infeasible at this budget")
    return "<br>".join(parts)
