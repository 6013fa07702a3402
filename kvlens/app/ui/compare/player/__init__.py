"""Two runs on one cursor, in the browser: two token strips, the maps of A, B and B - A at the step, curves over each
other.

The view joins the player's parts (kvlens/player/web) for two runs. The page keeps both payloads as it keeps the
player's, so playing sends nothing to the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from kvlens.app.ui.common import session
from kvlens.player.codec import pack
from kvlens.player.script import WEB, joined

_FOLDER = Path(__file__).resolve().parent
_STORE = joined(_FOLDER.parents[1] / "common/player/store.js")

_store = st.components.v2.component("kvlens_pair_store", js=_STORE)
_pair = st.components.v2.component(
    "kvlens_pair",
    html=(_FOLDER / "pair.html").read_text(encoding="utf-8"),
    css="\n".join(path.read_text(encoding="utf-8") for path in (WEB / "player.css", _FOLDER / "pair.css")),
    js=joined(_FOLDER / "component.js"),
)

KEY = "pair_player"


def pair_player(a: bytes, b: bytes, header: dict[str, object], on_change: Callable[[], None]) -> None:
    """Mounts the view. `a`, `b`: run payloads of the two runs. `header`: a, b (payload ids), rev, step, layer, head,
    metric, diverged (step or None), maps (whether B - A has a meaning), labels (two names). `on_change` is called after
    a commit; see `committed`."""
    _store(key="pair_store_a", data=a)
    _store(key="pair_store_b", data=b)
    _pair(key=KEY, data=pack(header, {}), on_selection_change=on_change)


def committed() -> object:
    """The view's last commit as the browser sent it: untrusted, see state.from_player."""
    return session.component_value(KEY, "selection")
