"""Groups of runs as points: how often the answer was right, against what that took."""

from __future__ import annotations

import json
from collections import Counter

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.methodmarks import mark
from kvlens.app.figures.theme import finish
from kvlens.methods.differences import varied
from kvlens.methods.naming import titled
from kvlens.text.units import si_bytes

#: What the horizontal axis may show: column of compare.groups.points -> title with unit.
AXES = {
    "peak_bytes": "peak KV bytes on the device inside a step, mean over prompts",
    "full_kv_share": "peak KV bytes on the device, share of full KV in the run's number format",
    "h2d_bytes_per_step": "bytes moved to the device per decode step",
    "attended_tokens": "attended tokens per step and KV head",
}


LINE = ["method", "stand_in", "preset", "dtype", "settings"]
"""columns of compare.groups.points whose values make a line; its points differ in budget alone"""
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")
"""of the second and further lines of one method"""


def quality_points(frame: pd.DataFrame, axis: str, titles: dict[str, str]) -> go.Figure:
    """Exact match with 95 % Wilson intervals against one of AXES: a line per configuration, a point per budget, hollow
    where it rests on one prompt. `frame`: rows of compare.groups.points. `titles`: method -> its title."""
    figure = go.Figure()
    names, drawn = line_names(frame, titles), Counter[str]()
    for line, group in frame.groupby(LINE, sort=True):
        shown = group[group[axis].notna()].sort_values(axis)
        if shown.empty:
            continue
        method, name = str(line[0]), names[tuple(str(part) for part in line)]
        look = mark(method)
        dash = look.dash if not drawn[method] else DASHES[(drawn[method] - 1) % len(DASHES)]
        drawn[method] += 1
        figure.add_scatter(
            x=shown[axis],
            y=shown["exact"],
            name=name,
            mode="lines+markers",
            line={"color": look.color, "width": 1.2, "dash": dash},
            marker={
                "color": look.color,
                "size": 11,
                "symbol": [look.symbol + ("-open" if n == 1 else "") for n in shown["n"]],
                "line": {"width": 2},
            },
            hoverinfo="text",
            hovertext=[_hover(row, name) for _, row in shown.iterrows()],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": shown["high"] - shown["exact"],
                "arrayminus": shown["exact"] - shown["low"],
                "thickness": 1,
                "width": 3,
                "color": look.color,
            },
        )
    finish(figure, 380, uirevision=f"points-{axis}", legend=True)
    share = axis == "full_kv_share"
    suffix = "B" if "bytes" in axis else ""
    figure.update_layout(
        hovermode="closest", margin={"t": 20}, legend={"orientation": "h", "y": -0.22, "yanchor": "top"}
    )
    figure.update_yaxes(title_text="exact match (share of prompts)", range=[-0.04, 1.06], zeroline=False)
    figure.update_xaxes(
        title_text=AXES[axis],
        rangemode="tozero",
        zeroline=False,
        tickformat=".0%" if share else "~s",
        ticksuffix="" if share else suffix,
    )
    return figure


def line_names(frame: pd.DataFrame, titles: dict[str, str]) -> dict[tuple[str, ...], str]:
    """Return the key of each line (LINE) -> its method, and whatever tells it from the other lines: what differs among
    all lines of the method, and of the number formats, where there are several."""
    lines = sorted(set(frame[LINE].itertuples(index=False, name=None)))
    settings: dict[tuple[str, ...], dict[str, str]] = {
        line: {"preset": line[2], "number format": line[3], **json.loads(line[4])} for line in lines
    }
    names = {}
    for line in lines:
        line_settings = settings[line]
        varied_names = set(varied([settings[each] for each in lines if each[0] == line[0]]))
        differing = [name for name in line_settings if name in varied_names]
        if "number format" not in differing and frame["dtype"].nunique() > 1:
            differing.append("number format")
        words = [
            "" if not line_settings[name] else f"{name.replace('_', ' ')} {line_settings[name]}" for name in differing
        ]
        title = titled(titles.get(str(line[0]), str(line[0])), str(line[1]))
        names[tuple(str(part) for part in line)] = ", ".join([title, *words])
    return names


def _hover(row: pd.Series, name: str) -> str:
    prompts = "1 prompt" if row["n"] == 1 else f"{row['n']} prompts"
    return "<br>".join(
        (
            f"{name}, {'budget ' + row['budget'] if row['budget'] else 'no limit'}",
            f"exact {row['exact']:.2f} ({row['low']:.2f} to {row['high']:.2f}), {prompts}",
            f"peak {si_bytes(row['peak_bytes'])} ({row['full_kv_share']:.1%} of full KV)",
            f"to the device {si_bytes(row['h2d_bytes_per_step'])} per step",
            "attended tokens not recorded"
            if pd.isna(row["attended_tokens"])
            else f"{row['attended_tokens']:,.0f} attended tokens",
        )
    )
