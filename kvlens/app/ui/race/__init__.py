"""A race in the browser: lanes side by side, drawn by one component from lines that the job says.

Between two polls the component draws from what has come already, so that the lanes move evenly however seldom the page
asks. The JavaScript is in the files beside this one, joined in order with two of the player's; no build step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

import streamlit as st

_PLAYER = files("kvlens.app.ui.common.player")
_OWN = files(__package__)


def _own(part: str) -> str:
    return (_OWN / part).read_text(encoding="utf-8")


_lanes = st.components.v2.component(
    "kvlens_race",
    html=_own("lanes.html"),
    css=_own("lanes.css"),
    js="\n".join(
        [(_PLAYER / part).read_text(encoding="utf-8") for part in ("codec.js", "color.js")]
        + [_own(part) for part in ("lane.js", "lanes.js")]
    ),
)

KEY = "race_lanes"


def lanes(
    race: str,
    lines: Sequence[str],
    first: int,
    looks: Sequence[Mapping[str, str]],
    ended: bool,
    on_gap: Callable[[], None],
    on_open: Callable[[], None],
) -> None:
    """Mounts the lanes. lines: as `kvlens race --progress-json` says them, from number `first` on; looks: of each lane
    its title, colour and character. `on_gap` is called when lines before `first` did not come, see `wanted`; `on_open`
    after a click on a lane, see `opened`."""
    data = {"id": race, "lines": list(lines), "first": first, "looks": list(looks), "ended": ended}
    _lanes(key=KEY, data=data, on_from_change=on_gap, on_open_change=on_open)


def wanted() -> object:
    """The first line that the browser lacks: untrusted."""
    state = st.session_state.get(KEY)
    return None if state is None else state.get("from")


def opened() -> object:
    """The lane and the step that were clicked: untrusted."""
    state = st.session_state.get(KEY)
    return None if state is None else state.get("open")
