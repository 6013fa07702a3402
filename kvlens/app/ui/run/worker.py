"""The process that is kept for runs: whether it is there, what it holds, and a button that releases it."""

from __future__ import annotations

import streamlit as st

from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.warm import able, warm
from kvlens.cli.warm import idle_seconds
from kvlens.text.units import si_bytes

_KEY = "worker_release"
POLL_S = 1.0
"""seconds between looks at a reading that goes on"""
_DRAWN, _RELEASED = "worker_form_drawn", "worker_released"
"""keys of the session: what the form held when it was drawn last; a person released the process"""


def begin_worker(form: tuple[object, ...]) -> bool:
    """Begin the process while a person fills in the form: imports and the model are then ready when the run is started.
    Opening the page alone begins nothing, and a released process stays away until a run begins one. form: what the
    fields hold, compared with what they held when the form was drawn last in this session. Return whether they changed
    and the process is there."""
    last_form, st.session_state[_DRAWN] = st.session_state.get(_DRAWN), form
    changed = last_form not in (None, form)
    if warm.status() is not None:
        st.session_state.pop(_RELEASED, None)
    elif changed and not st.session_state.get(_RELEASED):
        warm.prepare()
    return changed and warm.status() is not None


def _release() -> None:
    st.session_state[_RELEASED] = True
    warm.release()


def worker_line() -> None:
    """Draw one line about the process; nothing where jobs start from nothing. While it reads the prompt of the form,
    the line is drawn again and again, and the page once the prompt is read: its estimate is then a smaller one."""
    if able():
        reads_now = manager().reads_ahead()
        st.fragment(_line, run_every=POLL_S if reads_now else None)(reads_now)


def _line(read_when_drawn: bool) -> None:
    reads_now = manager().reads_ahead()
    if read_when_drawn and not reads_now:
        st.rerun()
    status, minutes = warm.status(), f"{idle_seconds() / 60:.3g} minutes"
    if status is None:
        cause = "A run" if st.session_state.get(_RELEASED) else "A change of the form or a run"
        st.caption(
            f"No process is kept for runs. {cause} starts one, which reads this form's prompt while you fill it in. "
            f"It ends after {minutes} without a run."
        )
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        state = "reading the prompt of this form" if reads_now else "at work" if status.busy else "idle"
        st.caption(
            f"A process is kept for runs: {state}, {si_bytes(status.resident_bytes)} resident. It ends after {minutes} "
            "without a run.",
            width="content",
        )
        if not status.busy:
            st.button("Release its memory", key=_KEY, type="tertiary", on_click=_release)
