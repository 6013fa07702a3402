"""The Method page: what one method decided, told by a view of its own, or by the generic view of any method.

A view is a method's part `view` (kvlens.methods.parts) with `show(reader: TraceReader) -> None` that draws below the
title. It is loaded when it is needed; a method without one, or that is not installed here, has the generic one."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.parts import about
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.method import generic
from kvlens.methods.naming import installed, run_name, stand_in, titled
from kvlens.methods.parts import part
from kvlens.store.reader import TraceReader


def show(reader: TraceReader) -> None:
    """Title of the run's method, then its view."""
    title(reader)
    view(str(reader.meta.method))(reader)


def title(reader: TraceReader) -> None:
    """The method's name, its summary and its paper, from the catalogue; of a method that is not installed here the name
    alone."""
    entry = about(reader)
    if entry is None:
        st.subheader(plain(run_name(reader.meta)))
        st.caption(sentences.METHOD_NOT_LISTED)
        return
    st.subheader(plain(titled(str(entry["title"]), stand_in(str(reader.meta.method), reader.meta.config))))
    st.text(f"{str(entry['summary']).rstrip('.')}.")
    st.caption(plain(f"{str(entry['paper']).rstrip('.')}."))
    preset = reader.meta.preset
    if sets := dict(entry.get("presets") or {}).get(preset):
        numbers = ", ".join(f"{name}={value}" for name, value in sets.items())
        st.caption(plain(f"This run's preset {preset} sets {numbers}; what is said above is the method as published."))


def view(name: str) -> Callable[[TraceReader], None]:
    """The view of a method."""
    method = installed(name)
    module = None if method is None else part(method, "view", "kvlens.app.methods")
    function: Callable[[TraceReader], None] = (module or generic).show
    return function
