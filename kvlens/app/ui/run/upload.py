"""The prompt file of the form. It stays in the session, so that it survives leaving the page."""

from __future__ import annotations

import streamlit as st

from kvlens.text.plaintext import visible
from kvlens.text.promptfiles import MAX_BYTES, SUFFIXES

KEY = "form_file"
_STORED = "form_upload"
"""key of the session: (name, content)"""


def uploaded_file() -> tuple[str, bytes] | None:
    """Draws the field -> name and content of the file; None where there is none."""
    st.file_uploader(
        f"Prompt file: {', '.join(SUFFIXES)} in UTF-8, at most {MAX_BYTES // 2**20} MiB",
        [suffix[1:] for suffix in SUFFIXES],
        key=KEY,
        on_change=_store_upload,
    )
    stored: tuple[str, bytes] | None = st.session_state.get(_STORED)
    if stored is None:
        st.caption("Choose a file; it stays on this machine.")
        return None
    if st.session_state.get(KEY) is None:
        text, button = st.columns([5, 1], vertical_alignment="center")
        text.text(visible(f"In use: {stored[0]} ({len(stored[1]):,} bytes)"))
        button.button("Remove", key="form_upload_remove", on_click=_forget_upload)
    return stored


def put_file(name: str, content: bytes) -> None:
    """Use a file as if it had been uploaded."""
    st.session_state[_STORED] = (name, content)


def _store_upload() -> None:
    file = st.session_state.get(KEY)
    if file is None:
        _forget_upload()
    else:
        put_file(file.name, file.getvalue())


def _forget_upload() -> None:
    st.session_state.pop(_STORED, None)
