"""The browser's history: one entry for each place (history.js), from the first page on."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

SCRIPT = "<script>\n" + (files(__package__) / "history.js").read_text(encoding="utf-8") + "</script>"
_HEAD = b"<head>"
#: What is not passed on: a browser that kept the page without the script is not told that it is unchanged, and the page
#: comes as it is.
_UNASKED = (b"if-none-match", b"if-modified-since", b"accept-encoding")
_NAMES_VERSION = (b"etag", b"last-modified", b"content-length")


class History:
    """ASGI middleware: puts the script at the beginning of every HTML page. It has to be there before Streamlit's own,
    since the first script run writes the address already."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not _asks_for_a_page(scope):
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _UNASKED]
        opening_message: dict[str, Any] = {}
        body = bytearray()

        async def with_script(message: Any) -> None:
            if message["type"] == "http.response.start" and _is_page(message):
                opening_message.update(message)
                return
            if not opening_message:
                await send(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            page = bytes(body).replace(_HEAD, _HEAD + SCRIPT.encode(), 1)
            kept_headers = [
                (name, value) for name, value in opening_message["headers"] if name.lower() not in _NAMES_VERSION
            ]
            await send(opening_message | {"headers": [*kept_headers, (b"content-length", str(len(page)).encode())]})
            await send(message | {"body": page})

        await self._app(scope | {"headers": headers}, receive, with_script)


def _asks_for_a_page(scope: Any) -> bool:
    """A browser that goes to an address."""
    target = scope["type"] == "http" and scope["method"] == "GET"
    return target and b"text/html" in dict(scope["headers"]).get(b"accept", b"")


def _is_page(message: Any) -> bool:
    """An HTML page that was found."""
    headers = {name.lower(): value for name, value in message.get("headers", [])}
    return message["status"] == 200 and headers.get(b"content-type", b"").startswith(b"text/html")
