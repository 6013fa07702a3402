"""The script at the beginning of every page, and nowhere else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvlens.app.ui.common.history import SCRIPT, History

PAGE = b"<!doctype html><html><head><title>x</title></head></html>"
DOCUMENT = [(b"accept", b"text/html,*/*"), (b"if-none-match", b'"1"'), (b"accept-encoding", b"gzip"), (b"host", b"a")]


def answered(
    headers: list[tuple[bytes, bytes]], kind: bytes = b"text/html", status: int = 200, method: str = "GET"
) -> tuple[dict[bytes, bytes], bytes, dict[bytes, bytes]]:
    """(headers, body, headers that the app saw) of a page that comes in two pieces."""
    seen: dict[bytes, bytes] = {}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(dict(scope["headers"]))
        said = [(b"content-type", kind), (b"etag", b'"1"'), (b"content-length", str(len(PAGE)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": said})
        await send({"type": "http.response.body", "body": PAGE[:9], "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[9:]})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "headers": headers}
    asyncio.run(History(app)(scope, None, send))
    return dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:]), seen


def test_a_page_begins_with_the_script() -> None:
    headers, body, seen = answered(DOCUMENT)
    assert body == PAGE.replace(b"<head>", b"<head>" + SCRIPT.encode())
    assert headers[b"content-length"] == str(len(body)).encode()
    assert b"etag" not in headers
    assert set(seen) == {b"accept", b"host"}, "nothing tells the browser that what it kept is unchanged"


@pytest.mark.parametrize(
    "asked",
    [
        {"headers": [(b"accept", b"*/*")]},
        {"headers": DOCUMENT, "kind": b"application/json"},
        {"headers": DOCUMENT, "status": 404},
        {"headers": DOCUMENT, "method": "HEAD"},
    ],
)
def test_anything_else_is_as_it_was(asked: dict[str, Any]) -> None:
    headers, body, _ = answered(**asked)
    assert body == PAGE
    assert headers[b"etag"] == b'"1"'
