"""Needle grids: exact match by depth and length, a panel per method and budget. No Streamlit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.gridcells import FEW, cell_edge, cell_words, color_axis, hover_text, white_text
from kvlens.app.figures.theme import GREY, finish

ROW_PX, LEAST_PX = 32, 96
BESIDE, FEWER, GAP_PX = 8, 4, 62
"""panels in a row, and where trials are listed beside them; what lies between two rows: ticks and names"""
Cell = tuple[str, str, int, float]
"""(method, budget, length in tokens, depth)"""


def panels(cells: pd.DataFrame) -> tuple[list[str], list[str]]:
    """(methods, budgets) in their order; the method without a limit is left to a column of its own, so '' is no budget
    here."""
    methods = list(dict.fromkeys(cells["method"]))
    return methods, [budget for budget in dict.fromkeys(cells["budget"]) if budget]


def grid(
    cells: pd.DataFrame, titles: dict[str, str], selected: Cell | None, difference: bool = False, beside: int = BESIDE
) -> go.Figure:
    """Small multiples: a column per method, a row per budget, the methods after the first `beside` below these;
    x = length, y = depth, colour and text = exact match.

    `cells`: one row per method, budget, length and depth with `value` (what is coloured: 0..1, or -1..1 with
    `difference`; NaN = not run), `n`, `note` ('n/r', 'inf.' or '' where there is a value) and what the hover says. Each
    cell's target carries customdata [method, budget, length, depth], so that a click can be read back.
    """
    methods, budgets = panels(cells)
    budgets = budgets or [""]
    lengths, depths = sorted(cells["length"].unique()), sorted(cells["depth"].unique())
    wide, bands = min(beside, len(methods)), math.ceil(len(methods) / beside)
    rows = bands * len(budgets)
    panel = max(LEAST_PX, ROW_PX * len(depths))
    height = panel * rows + GAP_PX * (rows - 1) + 120
    named = {(1 + place // wide * len(budgets), 1 + place % wide): name for place, name in enumerate(methods)}
    figure = make_subplots(
        rows,
        wide,
        shared_yaxes=True,
        horizontal_spacing=0.012,
        vertical_spacing=GAP_PX / (height - 86) if rows > 1 else 0,
        subplot_titles=[
            titles.get(name, name) if (name := named.get((row, column))) else ""
            for row in range(1, rows + 1)
            for column in range(1, wide + 1)
        ],
        row_titles=[f"budget {budget}" if budget else "" for budget in budgets] * bands,
    )
    finish(figure, height, uirevision="needle-grid")
    figure.update_xaxes(
        range=[-0.5, len(lengths) - 0.5],
        tickvals=list(range(len(lengths))),
        ticktext=[f"{length:,}" for length in lengths],
        showgrid=False,
        zeroline=False,
        tickangle=0,
        tickfont={"size": 11},
    )
    depth_axis = {"tickvals": list(range(len(depths))), "ticktext": [f"{depth:.0%}" for depth in depths]}
    figure.update_yaxes(range=[len(depths) - 0.5, -0.5], showgrid=False, zeroline=False, **depth_axis)
    shapes: list[dict[str, Any]] = []
    for (top, column), name in named.items():
        for row, budget in enumerate(budgets, top):
            part = cells[(cells["method"] == name) & (cells["budget"] == budget)]
            if part.empty and row == top:
                part = cells[(cells["method"] == name) & (cells["budget"] == "")]
            if not part.empty:
                shapes += _panel(figure, part, row, column, lengths, depths, selected, titles, difference)
            figure.update_xaxes(showticklabels=row == top + len(budgets) - 1, row=row, col=column)
    for row in range(1, rows + 1):
        for column in range(1, wide + 1):
            if (row - (row - 1) % len(budgets), column) not in named:
                figure.update_xaxes(visible=False, row=row, col=column)
                figure.update_yaxes(visible=False, row=row, col=column)
    figure.update_yaxes(title_text="depth of the asked fact", row=(rows + 1) // 2, col=1)
    lowest = sum(row == 1 + (bands - 1) * len(budgets) for row, _ in named)
    figure.update_xaxes(title_text="length of the prompt (tokens)", row=rows, col=(lowest + 1) // 2)
    figure.update_annotations(font_size=13)
    figure.update_layout(
        clickmode="event+select",
        dragmode=False,
        hovermode="closest",
        hoverdistance=-1,
        margin={"l": 64, "r": 96, "t": 34, "b": 52},
        coloraxis=color_axis(difference),
        shapes=shapes,
    )
    return figure


def _panel(
    figure: go.Figure,
    part: pd.DataFrame,
    row: int,
    column: int,
    lengths: list[int],
    depths: list[float],
    selected: Cell | None,
    titles: dict[str, str],
    difference: bool,
) -> list[dict[str, Any]]:
    """One heat map with its grey cells and its targets; returns the shapes of its dashed edges and of the selected
    cell's outline."""
    subplot = figure.get_subplot(row, column)
    axes = subplot.xaxis.plotly_name.replace("axis", ""), subplot.yaxis.plotly_name.replace("axis", "")
    shapes: list[dict[str, Any]] = []
    cell_by_place = {(int(cell["length"]), float(cell["depth"])): cell for _, cell in part.iterrows()}
    values = np.full((len(depths), len(lengths)), np.nan)
    notes = [["n/r"] * len(lengths) for _ in depths]
    words = [[""] * len(lengths) for _ in depths]
    name, budget = str(part["method"].iloc[0]), str(part["budget"].iloc[0])
    targets: list[list[Any]] = []
    hover: list[str] = []
    for y, depth in enumerate(depths):
        for x, length in enumerate(lengths):
            cell = cell_by_place.get((int(length), float(depth)))
            targets.append([name, budget, int(length), float(depth)])
            hover.append(hover_text(targets[-1], cell, titles))
            if cell is not None:
                values[y, x], notes[y][x] = cell["value"], str(cell["note"])
                words[y][x] = cell_words(cell, difference)
                if 0 < cell["n"] < FEW:
                    shapes.append(cell_edge(x, y, axes, {"color": "#000000", "width": 1, "dash": "dot"}))
    white = white_text((values + 1) / 2 if difference else values)
    for ink, shown in (("#000000", ~white), ("#ffffff", white)):  # a heat map has one colour of text
        figure.add_heatmap(
            z=np.where(shown, values, np.nan),
            coloraxis="coloraxis",
            hoverinfo="skip",
            xgap=1,
            ygap=1,
            row=row,
            col=column,
            name=f"{titles.get(name, name)} {budget}",
            text=np.where(shown, words, ""),
            texttemplate="%{text}",
            textfont={"size": 11, "color": ink},
        )
    if np.isnan(values).any():
        figure.add_heatmap(
            z=np.where(np.isnan(values), 1.0, np.nan),
            colorscale=[[0, GREY], [1, GREY]],
            showscale=False,
            hoverinfo="skip",
            xgap=1,
            ygap=1,
            text=notes,
            texttemplate="%{text}",
            textfont={"size": 11, "color": "#111111"},
            opacity=0.8,
            row=row,
            col=column,
        )
    unchanged = {"marker": {"opacity": 0.004}}
    ys, xs = np.divmod(np.arange(values.size), len(lengths))
    figure.add_scatter(
        x=xs,
        y=ys,
        mode="markers",
        hovertext=hover,
        hoverinfo="text",
        customdata=targets,
        selected=unchanged,
        unselected=unchanged,
        marker={"symbol": "square", "size": 30, "color": "#000000", "opacity": 0.004},
        showlegend=False,
        row=row,
        col=column,
    )
    if selected is not None and (name, budget) == selected[:2] and selected[2] in lengths and selected[3] in depths:
        x, y = lengths.index(selected[2]), depths.index(selected[3])
        shapes += [
            cell_edge(x, y, axes, {"color": color, "width": width}) for color, width in (("#000000", 5), ("#ffffff", 2))
        ]
    return shapes
