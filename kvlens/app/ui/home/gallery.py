"""The gallery of recorded losses, as cards: what was asked, what was expected, what came, why; a click opens the
replay."""

from __future__ import annotations

import streamlit as st

from kvlens.app import gallery
from kvlens.app.ui.common import data, places, widgets
from kvlens.app.ui.common.widgets import plain
from kvlens.lens.condition import KNOWN, listed, token_words
from kvlens.methods.naming import preset_name
from kvlens.runs.request import default_preset
from kvlens.store.errors import TraceError
from kvlens.text.plaintext import visible

_IN_A_ROW = 3


def shelf() -> None:
    """All cards, with and without runs of one's own."""
    losses = gallery.losses()
    title = f"Recorded losses of {losses[0].model}, of {len(losses)} methods: they open at once, nothing is computed"
    st.markdown(f"##### {plain(title)}")
    tokens = token_words([loss.prompt_tokens for loss in losses])
    budgets = listed((f"budget {loss.budget}" for loss in losses), "budgets")
    st.caption(plain(f"{losses[0].model} · {tokens} · {KNOWN} · {budgets} · n = 1 each"))
    _rows(losses)


def _rows(losses: tuple[gallery.Loss, ...]) -> None:
    for start in range(0, len(losses), _IN_A_ROW):
        for column, loss in zip(st.columns(_IN_A_ROW), losses[start : start + _IN_A_ROW], strict=False):
            key = f"loss_{loss.method}"
            with column.container(border=True, height="stretch", vertical_alignment="distribute", key=key):
                _card(loss)


def _card(loss: gallery.Loss) -> None:
    cause = f"{loss.cause[0].upper()}{loss.cause[1:]}"
    title = preset_name(loss.method, loss.preset, loss.overrides, default_preset(loss.method, loss.model))
    with st.container():  # one piece, so that the buttons of a row stand in a line
        widgets.method_mark(loss.method, title)
        st.text(visible(loss.question))
        came = f"“{plain(loss.came)}”" if loss.came else "nothing"
        st.markdown(f"Expected **“{plain(loss.expected)}”**, got :red[**{came}**]")
        st.caption(
            plain(
                f"A prompt of {loss.prompt_tokens} tokens, held to {loss.limit}. {loss.place}. {cause}. "
                f"{loss.held.sentence(loss.full_kv_bytes)}"
            )
        )
    opened = st.button(
        f"Open {title}'s loss", key=f"open_{loss.method}", icon=":material/play_circle:", width="stretch"
    )
    if opened:
        try:
            uid = gallery.bring(loss, data.runs_dir())
        except TraceError as problem:
            widgets.error(str(problem))
            return
        data.forget_runs()
        st.switch_page("pages/replay.py", query_params=places.in_run(uid))
