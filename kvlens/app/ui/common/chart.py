"""One way to draw a chart: the figure, and beside it a small menu that hands out its data (CSV, Parquet) and itself
(SVG, PNG)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from kvlens.app.figures.settled import Settled
from kvlens.app.ui.common import session
from kvlens.app.ui.common.widgets import guarded
from kvlens.player.script import joined
from kvlens.store.export import csv_bytes

Data = pd.DataFrame | Callable[[], pd.DataFrame]
"""the numbers behind a chart, units in the column names; a function is called when the menu is opened, not before"""

FORMATS = {"CSV": ("csv", "text/csv"), "Parquet": ("parquet", "application/vnd.apache.parquet")}


_FOLDER = Path(__file__).resolve().parent


def _saver(name: str, script: str, *labels: str) -> Any:
    """A component of one button per image format."""
    shown = "".join(
        f'<button type="button" data-format="{label.split()[0].lower()}">{label}</button>' for label in labels
    )
    css = (_FOLDER / "save.css").read_text(encoding="utf-8")
    return st.components.v2.component(
        name, html=f'<div class="formats">{shown}</div>', css=css, js=joined(_FOLDER / script)
    )


_save_image = _saver("kvlens_save_image", "savechart.js", "SVG image", "PNG image")
_save_canvas = _saver("kvlens_save_canvas", "savecanvas.js", "SVG image", "PNG image")

#: The menu's button stands in the corner below the figure, on the line of the axis title; see `nav.STYLE`. Plotly's own
#: bar of buttons, there while the pointer is, covers no title.
STYLE = (
    '[class*="st-key-save_"] { margin-top: -3.1rem; margin-bottom: -0.4rem; position: relative; z-index: 2; '
    "pointer-events: none; } "
    '[class*="st-key-save_"] button { pointer-events: auto; } '
    ".js-plotly-plot .modebar-group { background: transparent !important; } "
    # Streamlit measures the width twice and rounds it once. Both measures agree on whole pixels.
    '[data-testid="stFullScreenFrame"] { width: round(down, 100%, 1px); } '
    # Text of axes, scales and legends is written in the page's own ink, on light and on dark ground.
    ".js-plotly-plot :is([class$='tick'], [class^='g-'][class$='title'], .cbaxis, [class*='cbtitle'], .legendtext, "
    ".annotation-text) :is(text, tspan), "
    ".js-plotly-plot :is(.legendtext, .annotation-text, text[class$='title']) { fill: currentColor !important; }"
)


def chart(
    figure: go.Figure, data: Data, name: str, key: str, alt: str, *, on_select: Callable[[], None] | None = None
) -> None:
    """Draws `figure` over the full width, with its menu of downloads.

    `data`: the numbers behind it, long or wide, a unit in every column name that needs one. `name`: stem of the file
    names, such as f"{uid}-coverage". `key`: unique on the page; a click is found under it in the session's state.
    `alt`: what the chart shows, for those who cannot see it. `on_select`: called after a click on a point. Colours
    follow the theme at the page's last run."""
    theme = st.context.theme.type or "light"
    st.plotly_chart(
        Settled(figure, theme, selectable=on_select is not None),
        theme=None,
        key=key,
        alt=alt,
        on_select=on_select or "ignore",
        selection_mode="points",
        config=image_config(name),
    )
    menu(data, name, key)


def image_config(name: str) -> dict[str, Any]:
    """Options of Plotly's bar of buttons: the image button saves a vector image under `name`."""
    return {"displaylogo": False, "toImageButtonOptions": {"format": "svg", "filename": name}}


def menu(data: Data, name: str, key: str, *, image: bool = True) -> None:
    """The menu alone, for a picture that is no Plotly figure; `image`: also offer the figure drawn under `key` as an
    image."""
    _menu(
        data,
        name,
        key,
        f"save_{key}" if image else None,
        _save_image if image else None,
        {"key": key, "caption": session.condition()},
    )


def canvas_menu(data: Data, name: str, key: str, caption: str) -> None:
    """The menu of a component that draws on canvases, mounted under `key`: the numbers, and an SVG or a PNG of its
    canvases as they stand.

    `caption`: what the picture shows, a line per line, written above it, and below it the condition of the page."""
    whole = "\n".join(line for line in (caption, session.condition()) if line)
    _menu(data, name, key, None, _save_canvas, {"key": key, "name": name, "caption": whole})


@st.fragment
def _menu(
    data: Data, name: str, key: str, place: str | None, images: Callable[..., Any] | None, about: dict[str, str]
) -> None:
    """The files are made when the menu is opened, by this part of the page alone, and lie ready then: a click that asks
    for a file to be made fails where the script runs at that moment. An error then is a sentence in the menu: the page
    around it does not run."""

    def draw_menu() -> None:
        _buttons(data, name, key)
        if images is not None:
            images(key=f"{key}_image", data=about)

    with st.container(horizontal=True, horizontal_alignment="right", key=place):
        shown = st.popover("Save", type="tertiary", icon=":material/download:", key=f"{key}_menu", on_change="rerun")
        if shown.open:
            with shown:
                guarded(draw_menu)()


def _buttons(data: Data, name: str, key: str) -> None:
    """A download button per table format."""
    frame = data() if callable(data) else data
    for column, (label, (ending, mime)) in zip(st.columns(len(FORMATS)), FORMATS.items(), strict=True):
        column.download_button(
            f"{label} data",
            table_file(frame, ending),
            f"{name}.{ending}",
            mime,
            key=f"{key}_{ending}",
            on_click="ignore",
            width="stretch",
        )


def table_file(data: Data, ending: str) -> bytes:
    """The table as 'csv' (text that a spreadsheet would run is disarmed, see store.export) or 'parquet'."""
    frame = data() if callable(data) else data
    if ending == "csv":
        return csv_bytes(frame)
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), out, compression="zstd")
    return out.getvalue()
