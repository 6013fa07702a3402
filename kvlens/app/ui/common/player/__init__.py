"""The client-side player: two inline components, one that keeps a run's payload in the page and one that draws it.

Playing sends nothing to the server. The JavaScript is in the files beside this one, joined in order; no build step."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import streamlit as st

_FOLDER = files(__package__)
_STORE_PARTS = ("codec.js", "store.js")
_PLAYER_PARTS = (
    "codec.js",
    "color.js",
    "spans.js",
    "strip.js",
    "cachemap.js",
    "wanted.js",
    "heatmap.js",
    "tracks.js",
    "jumps.js",
    "stepper.js",
    "player.js",
    "render.js",
)


def _join(parts: tuple[str, ...]) -> str:
    return "\n".join((_FOLDER / part).read_text(encoding="utf-8") for part in parts)


_store = st.components.v2.component("kvlens_store", js=_join(_STORE_PARTS))
_player = st.components.v2.component(
    "kvlens_player", html=_join(("player.html",)), css=_join(("player.css",)), js=_join(_PLAYER_PARTS)
)

KEY = "player"


def player(run: bytes, head: bytes, on_change: Callable[[], None]) -> None:
    """Mounts the player. `run`: run_payload, `head`: slice_payload. `on_change` is called after a commit; see
    `committed`."""
    _store(key="player_store", data=run)
    _player(key=KEY, data=head, on_selection_change=on_change)


def committed() -> object:
    """The player's last commit as the browser sent it: untrusted, see state.from_player."""
    state = st.session_state.get(KEY)
    return None if state is None else state.get("selection")
