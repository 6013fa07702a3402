"""One way to draw a chart: the figure, and beside it a small menu that hands out its data (CSV, Parquet) and itself (SVG, PNG)."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st

from kvlens.store.export import csv_bytes

Data = pd.DataFrame | Callable[[], pd.DataFrame]
"""the numbers behind a chart, units in the column names; a function is called when a file is asked for, not before"""

FORMATS = {"CSV": ("csv", "text/csv"), "Parquet": ("parquet", "application/vnd.apache.parquet")}

#: Plotly's own image button does the work: it reads its options when it is pressed, so each of ours sets the format and presses it.
#: The page's ground is painted in for that moment, because the light text of a dark page cannot be read on white paper.
_SAVE_JS = """
export default function ({ data, parentElement }) {
  const save = (format) => {
    const place = "st-key-" + data.key.trim().replace(/[^a-zA-Z0-9_-]/g, "-");
    const plot = document.querySelector(`.${CSS.escape(place)} .js-plotly-plot`);
    const press = plot && plot.querySelector('.modebar-btn[data-title^="Download plot"]');
    if (!press) return;
    const options = plot._context.toImageButtonOptions;
    const ground = plot.layout.paper_bgcolor;
    plot._context.toImageButtonOptions = { ...options, format, scale: format === "png" ? 2 : 1 };
    plot.layout.paper_bgcolor = getComputedStyle(parentElement.querySelector("button")).getPropertyValue("--st-background-color").trim();
    press.click();
    plot._context.toImageButtonOptions = options;
    plot.layout.paper_bgcolor = ground;
  };
  for (const button of parentElement.querySelectorAll("button")) button.onclick = () => save(button.dataset.format);
}
"""
_SAVE_HTML = '<button type="button" data-format="svg">SVG image</button><button type="button" data-format="png">PNG image</button>'
_SAVE_CSS = """
:host { display: block; }
button { font: inherit; font-family: var(--st-font); font-size: 0.875rem; color: var(--st-text-color); display: block;
  background: var(--st-background-color);
  border: 1px solid var(--st-border-color); border-radius: 8px; padding: 4px 12px; min-height: 40px; width: 100%; cursor: pointer;
  margin-bottom: 16px; }
button:last-child { margin-bottom: 0; }
button:hover { border-color: var(--st-primary-color); color: var(--st-primary-color); }
button:focus-visible { outline: 2px solid var(--st-primary-color); }
"""
_save_image = st.components.v2.component("kvlens_save_image", html=_SAVE_HTML, css=_SAVE_CSS, js=_SAVE_JS)

#: The menu's button stands in the corner below the figure, on the line of the axis title; see `nav.STYLE`.
STYLE = '[class*="st-key-save_"] { margin-top: -3.1rem; margin-bottom: 0.6rem; position: relative; z-index: 2; pointer-events: none; } ' \
        '[class*="st-key-save_"] button { pointer-events: auto; }'  # fmt: skip


def chart(
    figure: go.Figure, data: Data, name: str, key: str, alt: str, *, on_select: Callable[[], None] | None = None
) -> None:  # fmt: skip
    """Draws `figure` over the full width, with its menu of downloads.

    `data`: the numbers behind it, long or wide, a unit in every column name that needs one. `name`: stem of the file names, such as
    f"{uid}-coverage". `key`: unique on the page; a click is found under it in the session's state. `alt`: what the chart shows, for
    those who cannot see it. `on_select`: called after a click on a point."""
    st.plotly_chart(
        figure, key=key, alt=alt, on_select=on_select or "ignore", selection_mode="points", config=image_config(name),
    )  # fmt: skip
    menu(data, name, key)


def image_config(name: str) -> dict[str, Any]:
    """Options of Plotly's bar of buttons: the image button saves a vector image under `name`."""
    return {"displaylogo": False, "toImageButtonOptions": {"format": "svg", "filename": name}}


def menu(data: Data, name: str, key: str, *, image: bool = True) -> None:
    """The menu alone, for a picture that is no Plotly figure; `image`: also offer the figure drawn under `key` as an image."""
    with (
        st.container(horizontal=True, horizontal_alignment="right", key=f"save_{key}" if image else None),
        st.popover("Save", type="tertiary", icon=":material/download:"),
    ):
        buttons(data, name, key)
        if image:
            _save_image(key=f"{key}_image", data={"key": key})


def buttons(data: Data, name: str, key: str) -> None:
    """A download button per table format; the file is made when one is pressed."""
    for label, (ending, mime) in FORMATS.items():
        st.download_button(
            f"{label} data", partial(table_file, data, ending), f"{name}.{ending}", mime,
            key=f"{key}_{ending}", on_click="ignore", width="stretch",
        )  # fmt: skip


def table_file(data: Data, ending: str) -> bytes:
    """The table as 'csv' (text that a spreadsheet would run is disarmed, see store.export) or 'parquet'."""
    frame = data() if callable(data) else data
    if ending == "csv":
        return csv_bytes(frame)
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), out, compression="zstd")
    return out.getvalue()
