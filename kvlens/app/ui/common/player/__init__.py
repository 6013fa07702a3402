"""The client-side player: two inline components, one that keeps a run's payload in the page and one that draws it.

Playing sends nothing to the server. The JavaScript is kvlens/player/web and the two files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from kvlens.app.ui.common import session
from kvlens.player.script import WEB, joined

_FOLDER = Path(__file__).resolve().parent

_store = st.components.v2.component("kvlens_store", js=joined(_FOLDER / "store.js"))
_player = st.components.v2.component(
    "kvlens_player",
    html=(WEB / "player.html").read_text(encoding="utf-8"),
    css=(WEB / "player.css").read_text(encoding="utf-8"),
    js=joined(_FOLDER / "component.js"),
)

KEY = "player"


def player(run: bytes, head: bytes, on_change: Callable[[], None]) -> None:
    """Mounts the player. `run`: run_payload, `head`: slice_payload. `on_change` is called after a commit; see
    `committed`."""
    _store(key="player_store", data=run)
    _player(key=KEY, data=head, on_selection_change=on_change)


def committed() -> object:
    """The player's last commit as the browser sent it: untrusted, see state.from_player."""
    return session.component_value(KEY, "selection")
