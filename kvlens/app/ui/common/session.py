"""Where Streamlit's session and the address bar meet the shared Selection."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from kvlens.app.ui.common.state import FIELDS, Selection, parse

_SELECTION, _WRITTEN, _REVISION = "kvlens_selection", "kvlens_written", "kvlens_revision"
_CONDITION = "kvlens_condition"


def selection() -> tuple[Selection, list[str]]:
    """The shared selection, and what could not be read from the URL.

    A URL that this session did not write itself (pasted link, Back button) wins over the session."""
    params = _in_url()
    problems: list[str] = []
    if params and params != st.session_state.get(_WRITTEN):
        parsed, problems = parse(params)
        st.session_state[_SELECTION] = parsed
        st.session_state[_REVISION] = revision() + 1
        st.session_state[_WRITTEN] = params
    return st.session_state.setdefault(_SELECTION, Selection()), problems


def _in_url() -> dict[str, str]:
    """The selection's part of the address bar, as the browser sent it with this run."""
    return {name: st.query_params[name] for name in FIELDS if name in st.query_params}


def store(view_selection: Selection) -> None:
    """Keeps a clamped selection without telling the player that Python moved it."""
    st.session_state[_SELECTION] = view_selection


def change(fields: Mapping[str, object], *, moved_by_python: bool = True) -> None:
    """Changes the selection. With `moved_by_python` the player is told to follow; its own commits must not echo back.

    The address that came with the change is older than it: two quick changes may both carry the address from before the
    first, which must not be taken for a pasted link."""
    current: Selection = st.session_state.get(_SELECTION, Selection())
    st.session_state[_SELECTION] = current.merged(fields)
    st.session_state[_WRITTEN] = _in_url()
    if moved_by_python:
        st.session_state[_REVISION] = revision() + 1


def follow(key: str, value: object) -> None:
    """Makes the widget `key`, not drawn yet, show `value` of the selection.

    Only where it shows something else: what is set is sent to the browser and replaces there what a person has chosen
    while the page was being drawn, and with it their choice."""
    if key not in st.session_state or st.session_state[key] != value:
        st.session_state[key] = value


def component_value(key: str, name: str) -> object:
    """Return what the component `key` sent last under `name`: untrusted; None before it has sent anything."""
    state = st.session_state.get(key)
    return None if state is None else state.get(name)


def set_condition(line: str) -> None:
    """Keeps the condition of what the page shows, for the images that it hands out; see `kvlens.lens.condition`."""
    st.session_state[_CONDITION] = line


def condition() -> str:
    """The condition of what the page shows; '' where the page has none."""
    return str(st.session_state.get(_CONDITION, ""))


def revision() -> int:
    """Counts the moves made by Python; the player follows when it grows."""
    return int(st.session_state.get(_REVISION, 0))


def write_selection() -> None:
    """Puts the selection into the address bar before the page is drawn, its other parameters as they are. Whoever uses
    a page that is still being drawn sends the address along, and one of the page before would be taken for a pasted
    link."""
    write_url({name: value for name, value in st.query_params.to_dict().items() if name not in FIELDS})


def write_url(extra: Mapping[str, str] | None = None) -> None:
    """Puts the selection, and a page's own parameters, into the address bar.

    Also where they came with this very run: after a link from a page to itself the browser still shows the address from
    before it, until it is told."""
    view_selection: Selection = st.session_state.get(_SELECTION, Selection())
    target = {**view_selection.query(), **(extra or {})}
    st.session_state[_WRITTEN] = view_selection.query()
    st.query_params.from_dict(target)
