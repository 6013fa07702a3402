"""Who is let in by token and cookie, from which machines, and what a refused request gets."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st

from kvlens.app.ui.common import access, reach
from kvlens.app.ui.common.door import _LET_IN, _MARK, Door
from kvlens.app.ui.common.startline import start_lines
from kvlens.app.ui.common.tokenpage import token_page

TOKEN = "0123456789abcdef+/"
OWN = "127.0.0.1:8501"
DATA = (
    "/",
    "/replay",
    "/_stcore/stream",
    "/_stcore/host-config",
    "/_stcore/upload_file/s/f",
    "/_stcore/bidi-components/x/y.js",
    "/component/x/index.html",
    "/media/abc.csv",
    "/static/js/main.js",
    "/_stcore/agent/mcp",
    "/_stcore/healthy",
)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Streamlit's options of a server on the loopback with a token; a test changes them."""
    chosen: dict[str, Any] = {"server.address": "127.0.0.1", "server.allowedHosts": [], "server.port": 8501}
    monkeypatch.setattr(st, "get_option", lambda name: chosen.get(name))
    monkeypatch.setenv("KVLENS_TOKEN", TOKEN)
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    access._key.cache_clear()
    yield chosen
    access._key.cache_clear()


def ask(
    path: str = "/", query: str = "", headers: dict[str, str] | None = None, client: str = "127.0.0.1", **scope: Any
) -> tuple[int, dict[str, str], dict[str, str] | None]:
    """Return status and headers of the answer, and the headers of the request that Streamlit got; None: it got none."""
    passed: list[dict[str, str]] = []
    sent: list[dict[str, Any]] = []

    async def streamlit(scope: Any, receive: Any, send: Any) -> None:
        passed.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    lines = {"host": OWN, **(headers or {})}
    request = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "client": (client, 40000),
        "headers": [(name.encode(), value.encode()) for name, value in lines.items()],
        **scope,
    }
    asyncio.run(Door(streamlit)(request, None, send))
    first = sent[0]
    if first["type"] == "websocket.close":
        return 403, {}, passed[0] if passed else None
    answer = {name.decode(): value.decode() for name, value in first["headers"]}
    return first["status"], answer, passed[0] if passed else None


@pytest.mark.parametrize("path", DATA)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
def test_nothing_passes_without_the_token(options: dict[str, Any], path: str, method: str) -> None:
    assert ask(path, method=method)[::2] == (403, None)
    assert ask(path, type="websocket", method="")[::2] == (403, None)
    for credential in ("token wrong", "token", f"basic {TOKEN}", f"token {TOKEN[:-1]}", ""):
        assert ask(path, method=method, headers={"authorization": credential})[0] == 403
    assert ask(path, method=method, headers={"authorization": f"Bearer {TOKEN}"})[0] == 200


def test_the_address_with_the_token_brings_a_cookie_and_loses_the_token(options: dict[str, Any]) -> None:
    status, answer, passed = ask("/replay", f"run=a&token={TOKEN.replace('+', '%2B')}&step=3")
    assert (status, answer["location"], passed) == (303, "/replay?run=a&step=3", None)
    cookie, *attributes = answer["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(attributes)
    assert TOKEN not in answer["set-cookie"]
    for kind in ("http", "websocket"):
        assert ask("/x", headers={"cookie": f"a=b; {cookie}; c"}, type=kind)[0] == 200
    assert ask("//evil.example/", f"token={TOKEN.replace('+', '%2B')}")[1]["location"] == "/evil.example/"
    https = ask("/", f"token={TOKEN.replace('+', '%2B')}", scheme="https")[1]["set-cookie"]
    assert https.endswith("; Secure")


def test_cookies_that_are_changed_old_or_of_another_key_are_void(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = access.new_cookie(secure=False).partition(";")[0]
    issued = int(re.findall(r"\d+", cookie)[0])
    assert ask(headers={"cookie": cookie})[0] == 200
    for changed in (cookie[:-1], cookie.replace(str(issued), str(issued + 5)), f"{access.COOKIE}=.", access.COOKIE):
        assert ask(headers={"cookie": changed})[0] == 403
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: issued + 86400 * (access.COOKIE_DAYS + 1))
        assert ask(headers={"cookie": cookie})[0] == 403
    access._key.cache_clear()
    assert ask(headers={"cookie": cookie})[0] == 200, "the next server of this user takes it"
    access.key_file().unlink()
    access._key.cache_clear()
    assert ask(headers={"cookie": cookie})[0] == 403


def test_the_key_is_the_users_own_whatever_the_umask(options: dict[str, Any]) -> None:
    before = os.umask(0)
    try:
        access.new_cookie(secure=False)
    finally:
        os.umask(before)
    path = access.key_file()
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    assert list(path.parent.iterdir()) == [path]
    first = access._key()
    path.chmod(0o644)
    access._key.cache_clear()
    assert access._key() != first, "a key that others may read is not used"


def test_only_health_is_answered_to_everybody(options: dict[str, Any]) -> None:
    assert ask("/_stcore/health")[0] == 200
    assert ask("/_stcore/health", headers={"host": "evil.example"})[0] == 403


def test_a_browser_gets_a_form_that_keeps_its_place(options: dict[str, Any]) -> None:
    status, answer, _ = ask("/replay", "run=a", headers={"accept": "text/html"})
    assert (status, answer["content-type"], answer["cache-control"]) == (403, "text/html; charset=utf-8", "no-store")
    page = token_page('/re"play', "run=%3Cb%3E&step=3", wrong=True)
    assert '<input type="hidden" name="run" value="&lt;b&gt;">' in page
    assert 'action="/re&quot;play"' in page


@pytest.mark.parametrize("address", [None, "", "127.0.0.1", "::1", "localhost"])
def test_other_machines_are_refused_unless_they_were_asked_for(options: dict[str, Any], address: str | None) -> None:
    options["server.address"] = address
    granted = {"authorization": f"token {TOKEN}"}
    assert ask(headers=granted, client="192.168.1.9")[0] == 403
    assert ask(headers=granted, client="::ffff:127.0.0.1")[0] == 200
    assert ask(headers=granted | {"host": "192.168.1.4:8501"})[0] == 403


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.4", "lab.example.org"])
def test_other_machines_that_were_asked_for_need_the_token(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    options["server.address"] = address
    host = {"host": "lab.example.org:8501"}
    assert ask(headers=host, client="192.168.1.9")[0] == 403
    assert ask(headers=host | {"authorization": f"token {TOKEN}"}, client="192.168.1.9")[0] == 200
    options["server.allowedHosts"] = ["other.example.org"]
    assert ask(headers=host | {"authorization": f"token {TOKEN}"}, client="192.168.1.9")[0] == 403
    monkeypatch.setenv("KVLENS_TOKEN", "off")
    assert access.token() is not None, "it cannot be turned off there"
    with pytest.raises(access.TokenRefused) as refused:
        access.check_token(reach.is_beyond_loopback())
    assert refused.value.code == "token_required"


def test_a_proxy_is_let_in_by_the_name_that_was_asked_for(options: dict[str, Any]) -> None:
    options["server.allowedHosts"] = ["kvlens.example.org"]
    granted = {"authorization": f"token {TOKEN}", "host": "kvlens.example.org"}
    assert ask(headers=granted, client="192.168.1.9")[0] == 200, "the client that the proxy names"


def test_what_passes_is_marked_and_a_mark_from_outside_is_dropped(options: dict[str, Any]) -> None:
    passed = ask(headers={"authorization": f"token {TOKEN}", _MARK: "from outside"})[2]
    assert passed is not None
    assert passed[_MARK] == _LET_IN


def test_short_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_TOKEN", "short")
    with pytest.raises(access.TokenRefused) as refused:
        access.check_token(beyond_loopback=False)
    assert refused.value.code == "token_too_short"
    assert len(str(access.token())) >= 32, "one is drawn where nobody checked"


def test_the_start_line_has_the_token(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_lines()[0] == "kvlens: http://127.0.0.1:8501/?token=0123456789abcdef%2B%2F"
    options["server.address"] = "::1"
    assert start_lines()[0].startswith("kvlens: http://[::1]:8501/?token=")
    options["server.address"] = "0.0.0.0"
    assert [line.startswith("kvlens: http://") for line in start_lines()] == [True, True, False]
    options["server.address"] = "127.0.0.1"
    monkeypatch.setenv("KVLENS_TOKEN", "off")
    assert start_lines()[0] == "kvlens: http://127.0.0.1:8501"
    assert ask()[0] == 200
