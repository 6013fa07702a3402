"""A figure in the page's own style that a browser draws once.

Streamlit passes a figure to Plotly and then passes a copy of it. Plotly compares the two, and draws again if it finds a
difference. It takes copies of a template and of a typed array for different ones. A settled figure has neither: its
layout contains the style, and its numbers are lists. Plotly compares lists by `datarevision` alone, which is constant
because Streamlit replaces the chart when the figure changes. Plotly also draws again when a margin grows, so the
margins have room for titles, legends and colour bars."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

INKS = {"light": "#1b1f24", "dark": "#e6edf3"}
"""colour of text by theme, as in `.streamlit/config.toml`"""
GROUNDS = {"light": ("#ffffff", "#d0d7de"), "dark": ("#0f1419", "#3a444f")}
"""ground and border of the hover box by theme, as in `.streamlit/config.toml`"""
FAINT = "rgba(128,132,149,0.22)"
"""colour of grid lines and ticks in both themes"""
FONT = '"Source Sans", sans-serif'
MOST_BESIDE = 260
"""largest margin in pixels for a legend beside a chart"""
DIGITS = {4: 6, 8: 9}
"""significant digits of the numbers sent, by the bytes of a recorded number"""


class Settled(go.Figure):
    """A figure in the style of the page. `st.plotly_chart(theme=None)` sends the result of `to_dict`."""

    def __init__(self, figure: go.Figure, theme: str, *, selectable: bool) -> None:
        """Wrap a figure without changing it. theme: 'light' or 'dark'. selectable: clicks select points."""
        super().__init__()
        self._figure = figure
        self._style = _style(theme, selectable)

    def to_dict(self) -> dict[str, Any]:
        """Return data and layout as dictionaries, lists, numbers and texts. Settings of the figure override the style.
        Margins are at least as wide as `_room` requires."""
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
    """Return the default settings of a layout."""
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
    """Return the default settings of an axis: no grid for x, a faint grid for y."""
    is_x = axis.startswith("x")
    style = {
        "automargin": True,
        "title": {"standoff": 18.75 if is_x else 22.5, "font": {"size": 13.125}},
        "gridcolor": FAINT,
        "zerolinecolor": FAINT,
    }
    return style | {"showgrid": False, "zeroline": False} if is_x else style


def _axes(trace: dict[str, Any]) -> tuple[str, str]:
    """Return the names of a trace's x and y axes in the layout."""
    return f"xaxis{trace.get('xaxis', 'x')[1:]}", f"yaxis{trace.get('yaxis', 'y')[1:]}"


def _room(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, int]:
    """Return the margins in pixels that usually hold the axis titles, the legend and the colour bars, by side. If they
    need more, Plotly widens the margin and draws the figure again."""
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
    """Set the values of `style` that a part of a figure's dictionary lacks."""
    for name, value in style.items():
        if isinstance(value, dict):
            _fill(part.setdefault(name, {}), value)
        else:
            part.setdefault(name, value)


def _listed(part: Any) -> Any:
    """Return a part of a figure's dictionary with arrays converted to lists, and times to texts."""
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
    """Return the numbers as float64, rounded to DIGITS. NaN and infinity become None, which JSON can hold."""
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    size = np.abs(np.where(finite & (exact != 0), exact, 1.0))
    scale = 10.0 ** np.clip(DIGITS.get(values.dtype.itemsize, 9) - 1 - np.floor(np.log10(size)), -290, 290)
    rounded: np.ndarray = np.round(exact * scale) / scale
    if not finite.all():
        rounded = rounded.astype(object)
        rounded[~finite] = None
    return rounded
