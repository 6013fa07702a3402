"""A race in the browser: lanes side by side, drawn by one component from lines that the job says.

Between two polls the component draws from what has come already, so that the lanes move evenly however seldom the page
asks. The JavaScript is in the files beside this one and in kvlens/player/web."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import streamlit as st

from kvlens.app.ui.common import session
from kvlens.player.script import joined

_FOLDER = Path(__file__).resolve().parent

_lanes = st.components.v2.component(
    "kvlens_race",
    html=(_FOLDER / "lanes.html").read_text(encoding="utf-8"),
    css=(_FOLDER / "lanes.css").read_text(encoding="utf-8"),
    js=joined(_FOLDER / "lanes.js"),
)

KEY = "race_lanes"


def lanes(
    race: str,
    lines: Sequence[str],
    start: int,
    looks: Sequence[Mapping[str, str]],
    ended: bool,
    on_gap: Callable[[], None],
    on_open: Callable[[], None],
) -> None:
    """Mounts the lanes. lines: as `kvlens race --progress-json` says them, from number `start` on; looks: of each lane
    its title, colour and character. `on_gap` is called when lines before `start` did not come, see `read_wanted_line`;
    `on_open` after a click on a lane, see `read_clicked_step`."""
    data = {"id": race, "lines": list(lines), "first": start, "looks": list(looks), "ended": ended}
    _lanes(key=KEY, data=data, on_from_change=on_gap, on_open_change=on_open)


def read_wanted_line() -> object:
    """The first line that the browser lacks: untrusted."""
    return session.component_value(KEY, "from")


def read_clicked_step() -> object:
    """The lane and the step that were clicked: untrusted."""
    return session.component_value(KEY, "open")
