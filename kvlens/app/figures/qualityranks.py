"""A quality table ranked: a row per method, the best at the largest budget first; no Streamlit, no files."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.quality import hover
from kvlens.app.figures.theme import finish
from kvlens.lab.results.summary import arm_titles

TITLE = 24
"""pixels of a panel's title"""
ROW = 19
"""pixels a method takes"""
SYMBOLS = ("circle-open", "circle", "diamond-open", "diamond", "square-open", "square")
"""of budgets, the smallest first; several of them share the last"""
NO_LIMIT = "no limit"
REFUSED = -0.001
ATTENDED = "attended tokens"
"""the rule of methods that are not held to resident bytes"""
FREE = "none"
"""the rule of full KV, and of methods that keep every token and take no share of them"""


def ranked(frame: pd.DataFrame, titles: dict[str, str]) -> go.Figure:
    """Exact match with 95 % Wilson intervals: a panel per task, a row per method in its family's colour, a symbol per
    budget; * behind a method that keeps every token on the device and was held to that share of attended tokens, †
    behind one that keeps every token and was held to nothing.
    A budget at which every prompt was infeasible is a cross at 0. frame: as kvlens.app.figures.quality.table makes
    it."""
    titles = _labels(frame, titles)
    tasks, names = list(dict.fromkeys(frame["task"])), _order(frame)
    budgets = sorted({str(budget) for budget in frame["budget"] if budget}, key=_share)
    figure = make_subplots(1, len(tasks), shared_yaxes=True, subplot_titles=tasks, horizontal_spacing=0.02)
    for place, budget in enumerate([*budgets, ""]):
        symbol = SYMBOLS[min(place, len(SYMBOLS) - 1)] if budget else "star"
        for column, task in enumerate(tasks, 1):
            part = frame[(frame["budget"].fillna("") == budget) & (frame["task"] == task)]
            _points(figure, part[part["exact"].notna()], budget, symbol, titles, column)
            _refused(figure, part[part["exact"].isna()], titles, column)
    above = 1 + TITLE / (ROW * len(names))  # the legend of many budgets is as wide as the panels' titles
    figure.update_layout(hovermode="closest", legend={"orientation": "h", "y": above, "yanchor": "bottom", "x": 0})
    finish(figure, 110 + TITLE + ROW * len(names), uirevision="quality-ranks", legend=True)
    figure.update_layout(margin={"t": 64 + TITLE})
    order = [titles.get(name, name) for name in names]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], dtick=1, showgrid=True)
    figure.update_xaxes(range=[-0.04, 1.04], tickformat=".1f", zeroline=False)
    figure.update_xaxes(title_text="exact match (share of prompts)", col=(len(tasks) + 1) // 2)
    return figure


def _labels(frame: pd.DataFrame, titles: dict[str, str]) -> dict[str, str]:
    held = set(frame.loc[frame["rule"] == ATTENDED, "method"])
    free = set(frame.loc[(frame["rule"] == FREE) & frame["budget"].fillna("").ne(""), "method"])
    signs = dict.fromkeys(free, " †") | dict.fromkeys(held, " *")
    return {name: title + signs.get(name, "") for name, title in arm_titles(titles, frame["method"]).items()}


def _points(
    figure: go.Figure, part: pd.DataFrame, budget: str, symbol: str, titles: dict[str, str], column: int
) -> None:
    if part.empty:
        return
    colors = [mark(str(name)).color for name in part["method"]]
    figure.add_scatter(
        x=part["exact"],
        y=[titles.get(str(name), str(name)) for name in part["method"]],
        mode="markers",
        name=f"budget {budget}" if budget else NO_LIMIT,
        legendgroup=budget or NO_LIMIT,
        showlegend=not any(trace.legendgroup == (budget or NO_LIMIT) for trace in figure.data),
        marker={"symbol": symbol, "color": colors, "size": 9, "line": {"color": colors, "width": 2}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": part["high"] - part["exact"],
            "arrayminus": part["exact"] - part["low"],
            "thickness": 1,
            "width": 0,
            "color": "rgba(128, 128, 128, 0.6)",
        },
        hovertext=[hover(row, titles) for _, row in part.iterrows()],
        hoverinfo="text",
        row=1,
        col=column,
    )


def _refused(figure: go.Figure, part: pd.DataFrame, titles: dict[str, str], column: int) -> None:
    part = part[part["infeasible"] > 0]
    if part.empty:
        return
    says = [
        f"{titles.get(str(row['method']), row['method'])}: infeasible at {row['budget']}"
        + (f", needs {row['smallest_feasible']:.0%}" if pd.notna(row["smallest_feasible"]) else "")
        for _, row in part.iterrows()
    ]
    figure.add_scatter(
        x=[0.0] * len(part),
        y=[titles.get(str(name), str(name)) for name in part["method"]],
        mode="markers",
        name="infeasible",
        legendgroup="infeasible",
        showlegend=not any(trace.name == "infeasible" for trace in figure.data),
        marker={"symbol": "x-thin-open", "color": "#888888", "size": 8},
        hovertext=says,
        hoverinfo="text",
        row=1,
        col=column,
    )


def _order(frame: pd.DataFrame) -> list[str]:
    """Methods, best first: by the mean over tasks at the largest budget, a task that is infeasible there counting a
    little less than none right, then at the smaller ones; those without a limit lead."""
    budgets = sorted({str(budget) for budget in frame["budget"] if budget}, key=_share, reverse=True)
    means: dict[Any, float] = dict(
        frame.assign(budget=frame["budget"].fillna(""), exact=frame["exact"].fillna(REFUSED))
        .groupby(["method", "budget"])["exact"]
        .mean()
    )

    def key(name: str) -> tuple[Any, ...]:
        if (name, "") in means:
            return (0,)
        scores = [means.get((name, budget), float("nan")) for budget in budgets]
        return (1, *(-score if score == score else 1.0 for score in scores), name)

    return sorted(map(str, dict.fromkeys(frame["method"])), key=key)


def _share(budget: str) -> float:
    """'10%' -> 10; bytes and tokens behind shares, by their number."""
    number = "".join(letter for letter in budget if letter.isdigit() or letter == ".")
    return (0.0 if budget.endswith("%") else 1e6) + float(number or 0)
