"""A study's curves: a figure along a numeric axis, one line a configuration."""

from __future__ import annotations

import plotly.graph_objects as go
from pandas import DataFrame

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.theme import SERIES, finish

HEIGHT = 400
_UNITS = {"share": ".0%", "bytes": "~s"}


def is_other_preset(part: DataFrame) -> list[bool]:
    """Return, for each point of a line, whether it ran another preset than the line's first point."""
    return [bool(preset != part["ran_preset"].iloc[0]) for preset in part["ran_preset"]]


def curves(points: DataFrame, axis: str, title: str, unit: str) -> go.Figure:
    """Return the chart of `kvlens.studies.table.Results.curve`. Whiskers are 95 % intervals. A point that ran another
    preset than the first of its line is hollow.

    Args:
        points: line, method (whose symbol the line has), x, ran_preset, n, value, low, high.
        title, unit: of the vertical axis.
    """
    figure = go.Figure()
    for number, (line, part) in enumerate(points.groupby("line", sort=False)):
        look, color = mark(str(part["method"].iloc[0])), SERIES[number % len(SERIES)]
        figure.add_scatter(
            x=part["x"],
            y=part["value"],
            name=str(line),
            mode="lines+markers",
            line={"color": color, "width": 1.6, "dash": look.dash},
            marker={
                "color": color,
                "size": 9,
                "symbol": [look.symbol + "-open" * is_other for is_other in is_other_preset(part)],
            },
            customdata=part[["n", "ran_preset"]],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (part["high"] - part["value"]).fillna(0),
                "arrayminus": (part["value"] - part["low"]).fillna(0),
                "thickness": 1,
                "width": 3,
                "color": color,
            },
            hovertemplate=f"{axis} %{{x}}: %{{y:.3g}}, n = %{{customdata[0]}}, preset %{{customdata[1]}}",
        )
    finish(figure, HEIGHT, uirevision=f"curve-{axis}-{title}", legend=True)
    figure.update_layout(
        hovermode="closest", margin={"t": 20}, legend={"orientation": "h", "y": -0.2, "yanchor": "top"}
    )
    figure.update_yaxes(title_text=f"{title} ({unit})", tickformat=_UNITS.get(unit), rangemode="tozero", zeroline=False)
    shares = axis == "budget" and bool((points["x"] <= 1).all())
    figure.update_xaxes(
        title_text="budget (share of full KV)" if axis == "budget" else axis,
        tickformat=".0%" if shares else None,
        zeroline=False,
    )
    return figure
