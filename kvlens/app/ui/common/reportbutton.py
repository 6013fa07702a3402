"""The buttons that make a report or a replay to hand to somebody."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from kvlens.app.report import report_bytes
from kvlens.player.page import player_html
from kvlens.store.reader import TraceReader


def report_button(
    reader: TraceReader, against: TraceReader | None = None, width: Literal["stretch", "content"] = "stretch"
) -> None:
    """Downloads the report on a run, or on two beside each other; it is made when the button is pressed."""
    name = f"kvlens-{reader.uid}" + (f"-against-{against.uid}" if against is not None else "")
    st.download_button(
        "Report (HTML)",
        lambda: report_bytes(reader, against),
        f"{name}.html",
        "text/html",
        key=f"report_{name}",
        on_click="ignore",
        icon=":material/description:",
        width=width,
        help="One file of about 5 MB that needs no other: verdict, answer, figures, settings, self-checks.",
    )


def replay_button(reader: TraceReader) -> None:
    """Download the replay of a run as one HTML file. The file is made when the button is pressed."""
    st.download_button(
        "Replay (HTML)",
        lambda: player_html(reader),
        f"kvlens-{reader.uid}-replay.html",
        "text/html",
        key=f"replay_{reader.uid}",
        on_click="ignore",
        icon=":material/play_circle:",
        help="One file that plays this run step by step in any browser. It sends no request.",
    )
