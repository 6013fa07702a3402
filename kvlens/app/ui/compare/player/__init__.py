"""Two runs on one cursor, in the browser: two token strips, the maps of A, B and B - A at the step, curves over each
other.

It is the player's parts (../player) put together for two runs; both payloads are kept in the page as the player's is,
so that playing sends nothing to the server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import streamlit as st

from kvlens.app.ui.common.player.codec import pack

_PLAYER = files("kvlens.app.ui.common.player")
_OWN = files(__package__)


def _join(*parts: str) -> str:
    """Files of the player, or of this folder where they begin with 'pair'."""
    return "\n".join(
        ((_OWN if part.startswith("pair") else _PLAYER) / part).read_text(encoding="utf-8") for part in parts
    )


_store = st.components.v2.component("kvlens_pair_store", js=_join("codec.js", "store.js"))
_pair = st.components.v2.component(
    "kvlens_pair",
    html=_join("pair.html"),
    css=_join("player.css", "pair.css"),
    js=_join(
        "codec.js",
        "color.js",
        "spans.js",
        "strip.js",
        "heatmap.js",
        "tracks.js",
        "stepper.js",
        "pairparts.js",
        "pair.js",
        "pairdraw.js",
    ),
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
    state = st.session_state.get(KEY)
    return None if state is None else state.get("selection")
