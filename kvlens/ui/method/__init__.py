"""The Method page: what one method decided, told by a view of its own, or by the generic view of any method.

A view is a module with `show(reader: TraceReader) -> None` that draws below the title. It is loaded when it is needed;
a method whose view does not exist, or that comes from a plugin, has the generic one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import streamlit as st

from kvlens.store.reader import TraceReader
from kvlens.ui.common.widgets import plain
from kvlens.ui.method.parts import about

#: Method -> 'module:function' of its view.
VIEWS: dict[str, str] = {
    name: f"kvlens.ui.method.{name}:show" for name in ("sekv", "chess", "freekv", "sentkv", "compresskv")
}
GENERIC = "kvlens.ui.method.generic:show"


def show(reader: TraceReader) -> None:
    """Title of the run's method, then its view."""
    title(reader)
    view(str(reader.meta.method))(reader)


def title(reader: TraceReader) -> None:
    """The method's name, its summary and its paper, from the catalogue; of a method that is not installed here the name
    alone."""
    entry = about(reader)
    if entry is None:
        st.subheader(plain(str(reader.meta.method)))
        st.caption("This method is not installed here, so only what the trace says of it can be shown.")
        return
    st.subheader(plain(str(entry["title"])))
    st.text(f"{str(entry['summary']).rstrip('.')}.")
    st.caption(plain(f"{str(entry['paper']).rstrip('.')}."))


def view(method: str) -> Callable[[TraceReader], None]:
    """The view of a method."""
    path = VIEWS.get(method, GENERIC)
    if importlib.util.find_spec(path.partition(":")[0]) is None:
        path = GENERIC
    module, _, function = path.partition(":")
    found: Callable[[TraceReader], None] = getattr(importlib.import_module(module), function)
    return found
