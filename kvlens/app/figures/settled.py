"""A figure in the page's own style that a browser draws once.

Streamlit's chart copies its figure when it appears and hands the copy to Plotly, which draws the figure again if
anything seems to differ. A template and a typed array always do, since a copy of either is another object, so a
settled figure has neither: its style stands in its own layout, and its numbers are sent as lists. Lists are new to
Plotly only with another `datarevision`; Streamlit replaces the whole chart for a new figure. Margins are wide enough
from the beginning in most cases, since a margin that grows draws a figure again too."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

INKS = {"light": "#1b1f24", "dark": "#e6edf3"}
"""text of figures, by the page's theme: that of `.streamlit/config.toml`"""
GROUNDS = {"light": ("#ffffff", "#d0d7de"), "dark": ("#0f1419", "#3a444f")}
"""ground and border of what the pointer shows, by the page's theme"""
FAINT = "rgba(128,132,149,0.22)"
"""grid lines and ticks, on light and dark ground"""
FONT = '"Source Sans", sans-serif'
MOST_BESIDE = 260
"""pixels that a legend beside a chart gets from the beginning"""
DIGITS = {4: 6, 8: 9}
"""significant digits that a number is sent with, by the bytes it has"""


class Settled(go.Figure):
    """A figure in the style of the page, for `st.plotly_chart(theme=None)`, which sends what `to_dict` returns."""

    def __init__(self, figure: go.Figure, theme: str, *, selectable: bool) -> None:
        """Wrap a figure, which stays as it is. theme: 'light' or 'dark'. selectable: clicks select points."""
        super().__init__()
        self._figure = figure
        self._style = _style(theme, selectable)

    def to_dict(self) -> dict[str, Any]:
        """Return data and layout as dictionaries, lists, numbers and texts. What the figure sets itself stays, but
        margins without room for what stands in them grow."""
        data = [_listed(trace.to_plotly_json()) for trace in self._figure.data]
        layout = _listed(self._figure.layout.to_plotly_json())
        layout.pop("template", None)
        for trace in data:
            if trace["type"] == "scatter" and "markers" in trace.get("mode", ""):
                _fill(trace, {"marker": {"line": {"width": 0}}})
        _fill(layout, self._style)
        cells = {axis for trace in data if trace["type"] == "heatmap" for axis in _axes(trace)}
        bars = {_axes(trace)[1] for trace in data if trace["type"] == "bar" and trace.get("orientation") == "h"}
        for axis in {"xaxis", "yaxis", *(name for name in layout if name[1:5] == "axis")}:
            if axis in cells | bars:
                _fill(layout, {axis: {"showgrid": False}})
            if axis in cells or layout.get(axis, {}).get("ticks"):
                _fill(layout, {axis: {"tickcolor": FAINT}})
            _fill(layout, {axis: _axis_style(axis)})
        for name in [name for name in layout if name.startswith("coloraxis")]:
            _fill(layout[name], {"colorbar": {"outlinewidth": 0, "len": 0.75}})
        for side, pixels in _room(data, layout).items():
            layout["margin"][side] = max(pixels, layout["margin"].get(side, 0))
        return {"data": data, "layout": layout}


def _style(theme: str, selectable: bool) -> dict[str, Any]:
    """What a layout gets where it says nothing."""
    ground, border = GROUNDS[theme]
    font = {"family": FONT, "size": 11.25, "color": INKS[theme]}
    clicks = {"clickmode": "event+select", "dragmode": "pan"} if selectable else {}
    return {
        "datarevision": 1,
        "font": font,
        "title": {"font": {"size": 14, "weight": "bold"}, "pad": {"l": 3.75}},
        "margin": {"pad": 7.5},
        "legend": {"valign": "top", "borderwidth": 0},
        "hoverlabel": {"bgcolor": ground, "bordercolor": border, "font": font},
        "hovermode": "closest",
        **clicks,
    }


def _axis_style(axis: str) -> dict[str, Any]:
    """What an axis gets where the figure says nothing: no grid for x, a faint one for y."""
    is_x = axis.startswith("x")
    style = {
        "automargin": True,
        "title": {"standoff": 18.75 if is_x else 22.5, "font": {"size": 13.125}},
        "gridcolor": FAINT,
        "zerolinecolor": FAINT,
    }
    return style | {"showgrid": False, "zeroline": False} if is_x else style


def _axes(trace: dict[str, Any]) -> tuple[str, str]:
    """Return the layout's names of the axes that a trace is drawn along."""
    return f"xaxis{trace.get('xaxis', 'x')[1:]}", f"yaxis{trace.get('yaxis', 'y')[1:]}"


def _room(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, int]:
    """Return the pixels that titles of axes, a legend below and a colour bar mostly need. Plotly finds out by itself if
    they need more, and then draws the figure anew."""
    titled = {name[0] for name, axis in layout.items() if name[1:5] == "axis" and axis["title"].get("text")}
    legend = layout["legend"]
    below = layout.get("showlegend") and legend.get("orientation") == "h" and legend.get("y", 1) < 0
    listed = [t for t in data if t.get("showlegend", t["type"] != "heatmap")] if layout.get("showlegend") else []
    names = [len(t.get("name", "")) for t in listed]
    beside = bool(names) and legend.get("orientation") != "h"
    bars = "coloraxis" in layout or any(t["type"] == "heatmap" and t.get("showscale", True) for t in data)
    return (
        ({"l": 92} if "y" in titled else {})
        | ({"b": 100} if below else {"b": 72} if "x" in titled else {})
        | ({"r": 110} if bars else {"r": min(75 + 5 * max(names), MOST_BESIDE)} if beside else {})
    )


def _fill(part: dict[str, Any], style: dict[str, Any]) -> None:
    """Sets what a part of a figure's dictionary does not say."""
    for name, value in style.items():
        if isinstance(value, dict):
            _fill(part.setdefault(name, {}), value)
        else:
            part.setdefault(name, value)


def _listed(part: Any) -> Any:
    """Return a part of a figure's dictionary with lists in place of its arrays, and times as texts."""
    if isinstance(part, dict):
        return {name: _listed(value) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_listed(value) for value in part] if part and isinstance(part[0], dict) else part
    if not isinstance(part, np.ndarray):
        return part
    if part.dtype.kind == "M":
        return np.datetime_as_string(part).tolist()
    return _rounded(part).tolist() if np.issubdtype(part.dtype, np.floating) else part.tolist()


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return numbers as float64, rounded to few digits; with None for NaN, which JSON lacks, they are objects."""
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    size = np.abs(np.where(finite & (exact != 0), exact, 1.0))
    scale = 10.0 ** np.clip(DIGITS.get(values.dtype.itemsize, 9) - 1 - np.floor(np.log10(size)), -290, 290)
    rounded: np.ndarray = np.round(exact * scale) / scale
    if not finite.all():
        rounded = rounded.astype(object)
        rounded[~finite] = None
    return rounded
