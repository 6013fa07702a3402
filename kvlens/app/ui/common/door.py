"""Who may look at the dashboard: this machine's own browser, on the dashboard's own address.

Every page that a browser has open may speak to servers on this machine. A request is answered only if its Host is one
of `server.allowedHosts` (loopback names unless set), if its Origin, where the browser names one, is that Host, and if
no other site put it into a frame or asked for it from a page of its own; a plain link from elsewhere may be followed.
Nothing is drawn or started for a request that is refused, as no session is made. `Door` stands before all of Streamlit,
static files included; `refuse_session` is asked once more by the script, for whoever starts a page's file alone.

A reverse proxy is allowed on purpose: start with ``--server.allowedHosts kvlens.example.org`` and have the proxy pass
the Host header on as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import streamlit as st

from kvlens.app.ui.common.settings import settings

#: What a browser calls a page inside another page.
_FRAMES = ("iframe", "frame", "embed", "object", "fencedframe")
_SAME = ("", "same-origin", "none")
_HEADERS = ((b"x-frame-options", b"SAMEORIGIN"), (b"content-security-policy", b"frame-ancestors 'self'"))


def refusal(headers: Mapping[str, str], hosts: list[str]) -> str | None:
    """The sentence why a request is not answered; None for one that is. `headers`: lower-case names; a browser sends
    Origin with every WebSocket, and Sec-Fetch-* to addresses of this machine."""
    host = headers.get("host", "").lower()
    if not _known(host, hosts):
        return f"This server does not go by the name '{_short(host)}'; name it in server.allowedHosts if it should."
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        return f"A page of another origin ('{_short(origin)}') may not use this server; open it by its own address."
    if headers.get("sec-fetch-site", "").lower() not in _SAME:
        if headers.get("sec-fetch-dest", "").lower() in _FRAMES:
            return "Another site put this page into a frame; open it by its own address."
        if headers.get("sec-fetch-mode", "").lower() != "navigate":
            return "A page of another site may not use this server; open it by its own address."
    return None


def _known(host: str, hosts: list[str]) -> bool:
    """Whether the Host is one of those allowed: as they are, '*.example.org' for all below it, '*' for all."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    for allowed in (each.strip().lower().rstrip(".") for each in hosts):
        if allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:])):
            return True
    return False


def allowed_hosts() -> list[str]:
    """Return the names that the server goes by. Where Streamlit's option is empty, which lets every name in, those of
    the settings file."""
    return list(st.get_option("server.allowedHosts") or settings()["server.allowedHosts"])


def _short(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80])


class Door:
    """ASGI middleware: refuses with status 403 before Streamlit sees the request, and forbids frames on what is
    answered."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        why = refusal(headers, allowed_hosts())
        if why is not None:
            await (_close if scope["type"] == "websocket" else _forbid)(send, why)
            return

        async def framed_by_none(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", []), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, framed_by_none)


async def _close(send: Any, why: str) -> None:
    """A WebSocket that was not accepted is answered with status 403."""
    await send({"type": "websocket.close", "code": 1008, "reason": why[:100]})


async def _forbid(send: Any, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff"), *_HEADERS]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def refuse_session() -> None:
    """Ends a script whose session came through no `Door` and should not have; silent where there is no connection."""
    headers = {name.lower(): value for name, value in st.context.headers.items()}
    if headers and (why := refusal(headers, allowed_hosts())) is not None:
        st.text(why)
        st.stop()
