"""Quality tables as figures: exact match against budget, attended tokens or bytes, with intervals. Lines as
kvlens.lab.bench.quality writes them; no Streamlit, no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.theme import finish
from kvlens.lab.results.formats import NARROW, WIDE, narrow_share
from kvlens.lab.results.summary import arm_name, arm_titles
from kvlens.text.units import si_bytes

#: What the horizontal axis may show: column -> (title, is a share).
AXES = {
    "resident_share": ("Peak bytes on the device, share of full KV in its own format", True),
    "resident_share_16bit": ("Peak bytes on the device, share of full KV in 16 bits", True),
    "read_share": ("Bytes read by a step, share of full KV in its own format", True),
    "attended_share": ("Attended tokens per step, share of the prompt", True),
    "h2d_bytes_per_step": ("Bytes moved to the device per step", False),
    "coverage": ("Coverage: full attention's mass on tokens attended exactly", True),
    "selection_recall": ("Selection recall: of full attention's strongest tokens the share attended", True),
    "budget_share": ("Budget, share of full KV (1: no limit)", True),
    "length": ("Length of the prompt (tokens)", False),
}
#: Of these, what a method uses.
COSTS = (
    "resident_share",
    "resident_share_16bit",
    "read_share",
    "attended_share",
    "h2d_bytes_per_step",
    "coverage",
    "selection_recall",
)
#: Axes that count tokens, not bytes.
TOKENS = ("length",)


def table(
    lines: list[dict[str, Any]], model: str = "", length: int | None = None, presets: Mapping[str, str | None] = {}
) -> pd.DataFrame:
    """Lines as rows, with the number format that their shares are of, and the peak as a share of full KV in 16 bits
    where it was measured for the model, the length and the preset that a
    method was asked for with. Methods, tasks and budgets are in their order, a control is named by
    its number format; columns that no line has are NaN, `presets` the names of those that were run."""
    columns = (
        "method",
        "budget",
        "task",
        "rule",
        "presets",
        "n",
        "infeasible",
        "smallest_feasible",
        "exact",
        "low",
        "high",
        "score",
        "coverage",
        "selection_recall",
        "attended_tokens",
        "attended_share",
        "resident_share",
        "read_share",
        "read_bytes_per_step",
        "h2d_bytes_per_step",
        "d2h_bytes_per_step",
    )
    rows = [{column: line.get(column) for column in columns} for line in lines]
    for row, line in zip(rows, lines, strict=True):
        row["method"] = arm_name(line["method"], line.get("dtype", ""))
        row["presets"] = ", ".join(row["presets"] or ())
        row["kv_format"] = line.get("dtype") or WIDE
        row["resident_share_16bit"] = (
            row["resident_share"]
            if line.get("dtype") == NARROW
            else narrow_share(model, length, line["method"], line["budget"], presets.get(line["method"]))
        )
    return pd.DataFrame(rows)


def quality(
    frame: pd.DataFrame, axis: str, titles: dict[str, str], panel: str = "task", names: dict[Any, str] | None = None
) -> go.Figure:
    """Exact match with 95 % Wilson intervals against one of AXES: a panel per value of the column `panel`, a line per
    method.

    `titles`: method -> its title. `names`: value of `panel` -> title of its panel; the value itself where left out.
    Rows whose prompts were all infeasible have no point.
    """
    titles = arm_titles(titles, frame["method"])
    shown = list(dict.fromkeys(frame[panel]))
    title, share = AXES[axis]
    figure = make_subplots(
        1,
        len(shown),
        shared_yaxes=True,
        subplot_titles=[(names or {}).get(value, str(value)) for value in shown],
        horizontal_spacing=0.03,
    )
    legend: set[str] = set()
    for name in dict.fromkeys(frame["method"]):
        look = mark(str(name))
        for column, value in enumerate(shown, 1):
            part = frame[(frame["method"] == name) & (frame[panel] == value) & frame["exact"].notna()].sort_values(axis)
            if part.empty:
                continue
            figure.add_scatter(
                x=part[axis],
                y=part["exact"],
                name=titles.get(str(name), str(name)),
                legendgroup=str(name),
                showlegend=name not in legend,
                mode="lines+markers",
                line={"color": look.color, "width": 1.5, "dash": look.dash},
                hovertext=[hover(row, titles) for _, row in part.iterrows()],
                marker={"color": look.color, "symbol": look.symbol, "size": 9},
                hoverinfo="text",
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": part["high"] - part["exact"],
                    "arrayminus": part["exact"] - part["low"],
                    "thickness": 1,
                    "width": 3,
                    "color": look.color,
                },
                row=1,
                col=column,
            )
            legend.add(str(name))
    finish(figure, 420, uirevision=f"quality-{axis}-{panel}", legend=True)
    figure.update_layout(
        legend={"orientation": "h", "y": -0.24, "yanchor": "top"}, hovermode="closest", margin={"t": 56}
    )
    figure.update_yaxes(range=[-0.04, 1.06], zeroline=False)
    figure.update_yaxes(title_text="exact match (share of prompts)", col=1)
    unit = "" if share or axis in TOKENS else "B"
    figure.update_xaxes(
        tickformat=".0%" if share else "," if axis in TOKENS else "~s",
        ticksuffix=unit,
        rangemode="tozero",
        zeroline=False,
    )
    if axis in TOKENS:
        figure.update_xaxes(tickvals=sorted(set(frame[axis])), tickangle=0)
    figure.update_xaxes(title_text=title, col=(len(shown) + 1) // 2)
    return figure


def hover(row: pd.Series, titles: dict[str, str]) -> str:
    parts = [
        f"{titles.get(str(row['method']), row['method'])}, {row['budget'] or 'no limit'}"
        + (f" of {row['rule']}" if row["budget"] else ""),
        f"exact {row['exact']:.2f} ({row['low']:.2f} to {row['high']:.2f}), n = {int(row['n'])}",
        f"coverage {row['coverage']:.2f}, attended {row['attended_share']:.1%}, resident {row['resident_share']:.1%}",
        f"to device {si_bytes(row['h2d_bytes_per_step'])} per step",
    ]
    if pd.notna(row.get("read_share")):
        parts.append(f"reads {si_bytes(row['read_bytes_per_step'])} per step, {row['read_share']:.1%} of full KV")
    if pd.notna(row.get("selection_recall")):
        parts.append(f"selection recall {row['selection_recall']:.2f}")
    if row.get("presets"):
        parts.append(f"preset {row['presets']}")
    if row["infeasible"]:
        parts.append(f"{int(row['infeasible'])} more prompts infeasible at this budget")
    return "<br>".join(parts)
