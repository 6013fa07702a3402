"""Who may look at the dashboard: this machine's own browser, on the dashboard's own address, with the server's token.

Every page that a browser has open may speak to servers on this machine. A request is answered only if its Host is one
of `server.allowedHosts` (loopback names unless set), if its Origin, where the browser names one, is that Host, and if
no other site put it into a frame or asked for it from a page of its own; a plain link from elsewhere may be followed.
Other machines are answered only if the user asked for them (`reach`). Then the request needs the token (`access`), or
the cookie that the token brings.
Nothing is drawn or started for a request that is refused, as no session is made. `Door` stands before all of Streamlit,
static files included. It marks every request that it lets in: `refuse_session` ends a script whose session has no mark,
as a page's file has that is started alone.

A reverse proxy is allowed on purpose: start with ``--server.allowedHosts kvlens.example.org`` and have the proxy pass
the Host header on as it came.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import streamlit as st

from kvlens.app.ui.common.access import is_granted, new_cookie, query_without_token
from kvlens.app.ui.common.reach import allowed_hosts, is_open_to
from kvlens.app.ui.common.tokenpage import POLICY, SENTENCE, token_page

#: What a browser calls a page inside another page.
_FRAMES = ("iframe", "frame", "embed", "object", "fencedframe")
_SAME = ("", "same-origin", "none")
_HEADERS = (
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"referrer-policy", b"same-origin"),
)
HEALTH = "/_stcore/health"
"""what a supervisor may ask without a token: the answer is 'ok' and holds no data"""
_MARK = "x-kvlens-door"
_LET_IN = secrets.token_hex(16)
"""the mark of this process"""


def refusal(headers: Mapping[str, str], hosts: list[str]) -> str | None:
    """The sentence why a request is not answered; None for one that is. `headers`: lower-case names; a browser sends
    Origin with every WebSocket, and Sec-Fetch-* to addresses of this machine."""
    host = headers.get("host", "").lower()
    if not _is_allowed(host, hosts):
        return f"This server does not accept the name '{_short(host)}'; add the name to server.allowedHosts."
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        return f"A page of another origin ('{_short(origin)}') may not use this server; open it by its own address."
    if headers.get("sec-fetch-site", "").lower() not in _SAME:
        if headers.get("sec-fetch-dest", "").lower() in _FRAMES:
            return "Another site put this page into a frame; open it by its own address."
        if headers.get("sec-fetch-mode", "").lower() != "navigate":
            return "A page of another site may not use this server; open it by its own address."
    return None


def _is_allowed(host: str, hosts: list[str]) -> bool:
    """Whether the Host is one of those allowed: as they are, '*.example.org' for all below it, '*' for all."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    for allowed in (each.strip().lower().rstrip(".") for each in hosts):
        if allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:])):
            return True
    return False


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
        client = scope.get("client")
        why = refusal(headers, allowed_hosts())
        if why is None and not is_open_to(None if client is None else client[0]):
            why = (
                "This server answers its own machine only. Start it with `kvlens app` and a host to open it to others."
            )
        if why is None and not is_granted(headers) and not scope["path"].endswith(HEALTH):
            if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
                await _ask_for_token(scope, headers, send)
                return
            why = SENTENCE
        if why is not None:
            await (_close if scope["type"] == "websocket" else _forbid)(send, why)
            return

        async def framed_by_none(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", []), *_HEADERS]}
            await send(message)

        await self._app(_marked(scope), receive, framed_by_none)


def _marked(scope: Any) -> Any:
    """Return the request with the mark of those that came through the door."""
    mark = _MARK.encode()
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != mark]
    return scope | {"headers": [*headers, (mark, _LET_IN.encode())]}


async def _ask_for_token(scope: Any, headers: Mapping[str, str], send: Any) -> None:
    """Answer a request whose address holds the token with a cookie and the address without it, others with the form."""
    right, rest = query_without_token(scope["query_string"].decode("latin-1"))
    path = "/" + (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").lstrip("/\\")
    if right:
        place = f"{path}?{rest}" if rest else path
        cookie = new_cookie(scope.get("scheme") == "https")
        answer = [(b"location", place.encode("latin-1")), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 303, "headers": [*answer, *_HEADERS]})
        await send({"type": "http.response.body", "body": b""})
    elif "text/html" in headers.get("accept", ""):
        await _refuse(send, token_page(path, rest, wrong=right is False), "text/html", POLICY)
    else:
        await _forbid(send, SENTENCE)


async def _close(send: Any, why: str) -> None:
    """A WebSocket that was not accepted is answered with status 403."""
    await send({"type": "websocket.close", "code": 1008, "reason": why[:100]})


async def _forbid(send: Any, why: str) -> None:
    await _refuse(send, f"{why}\n", "text/plain", "frame-ancestors 'self'")


async def _refuse(send: Any, text: str, kind: str, policy: str) -> None:
    headers = [
        (b"content-type", f"{kind}; charset=utf-8".encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", policy.encode()),
        *(pair for pair in _HEADERS if pair[0] != b"content-security-policy"),
    ]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def refuse_session() -> None:
    """End a script whose session came through no `Door`; silent where there is no connection."""
    headers = {name.lower(): value for name, value in st.context.headers.items()}
    if headers and headers.get(_MARK) != _LET_IN:
        st.text("This page was started without the door of the dashboard. Start the dashboard with kvlens app.")
        st.stop()
