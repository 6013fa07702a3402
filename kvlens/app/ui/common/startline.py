"""What a server prints when it starts: its address with the token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import streamlit as st
from streamlit import config

from kvlens.app.ui.common.access import PARAMETER, TokenRefused, check_token, token
from kvlens.app.ui.common.reach import HOSTS, addresses, allowed_hosts, is_beyond_loopback


def start_lines() -> list[str]:
    """Return the lines to print."""
    needed = token()
    query = "" if needed is None else f"/?{urlencode({PARAMETER: needed})}"
    lines = [f"kvlens: {address}{query}" for address in addresses()]
    if needed is None:
        return [*lines, "No token is needed: every user of this machine may read all runs and start runs."]
    return [*lines, "Whoever has this address may read all runs and start runs. Ctrl-C stops the server."]


def refuse_start() -> None:
    """Raise SystemExit with one sentence if the server cannot start with this choice of token."""
    try:
        check_token(is_beyond_loopback())
    except TokenRefused as refused:
        raise SystemExit(f"kvlens: {refused}") from None


@asynccontextmanager
async def announced(server: Any) -> AsyncIterator[None]:
    """Print the start lines; the server answers after that."""
    if list(st.get_option(HOSTS)) != allowed_hosts():  # Streamlit checks the names of WebSockets itself
        config.set_option(HOSTS, [name for name in allowed_hosts() if name != "*"])
    print("\n".join(start_lines()), flush=True)
    yield
