"""The place that a run opened with before its effects were stored. When they arrive, the verdict may name another span,
and a place that the user did not choose follows it."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common import data, session
from kvlens.app.ui.common.data import TraceReader
from kvlens.app.ui.common.state import Selection
from kvlens.store.amend import PENDING

_OPENED = "kvlens_opened_without_effects"


def remember_opening(uid: str, opening: Selection) -> None:
    """Keep the place that the app chose in a run whose effects are not stored yet: on its page, or in a link to it."""
    st.session_state.setdefault(_OPENED, {})[uid] = opening


def follow_effects(reader: TraceReader, selection: Selection) -> Selection:
    """Return the selection, moved to the span that the verdict names once the run's effects are stored.

    It moves if its layer, query head and span are still those that the app chose before; the step stays."""
    opening = data.opening(reader, data.metrics(reader), selection.metric)
    if reader.meta.no_effects == PENDING:
        remember_opening(reader.uid, opening)
        return selection
    opened = st.session_state.get(_OPENED, {}).pop(reader.uid, None)
    if opened is None or _place(selection) != _place(opened) or _place(opening) == _place(opened):
        return selection
    place = {"layer": opening.layer, "head": opening.head, "span": opening.span}
    session.change(place)
    return selection.merged(place)


def _place(selection: Selection) -> tuple[int | None, int | None, int | None]:
    return selection.layer, selection.head, selection.span
