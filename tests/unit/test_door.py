"""Who is let in, by the headers of a request."""

from __future__ import annotations

import pytest
import streamlit as st

from kvlens.app.ui.common.door import refusal
from kvlens.app.ui.common.reach import allowed_hosts

HOSTS = ["localhost", "127.0.0.1", "*.example.org"]
OWN = "127.0.0.1:8501"
LET_IN = [
    {"host": OWN},
    {"host": OWN, "origin": f"http://{OWN}", "sec-fetch-site": "same-origin"},
    {"host": "LOCALHOST:8501", "origin": "http://localhost:8501"},
    {"host": "kvlens.example.org", "origin": "https://kvlens.example.org"},  # a proxy that passes Host on
    {"host": OWN, "sec-fetch-site": "none", "sec-fetch-mode": "navigate"},  # typed into the address bar
    {"host": OWN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},  # a link
    {"host": OWN, "sec-fetch-site": "same-origin", "sec-fetch-dest": "iframe", "sec-fetch-mode": "navigate"},
]
REFUSED = [
    {},
    {"host": "evil.example"},
    {"host": "evil.example", "origin": "http://evil.example"},  # a name that was made to lead here
    {"host": "127.0.0.1.evil.example"},
    {"host": "example.org.evil"},
    {"host": "[::1"},
    {"host": OWN, "origin": "http://127.0.0.1:8502"},
    {"host": OWN, "origin": "http://localhost:8501"},
    {"host": OWN, "origin": "null"},
    {"host": OWN, "origin": "file://"},
    {"host": OWN, "sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    {"host": OWN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
    {"host": OWN, "sec-fetch-site": "same-site", "sec-fetch-mode": "websocket"},
]


@pytest.mark.parametrize("headers", LET_IN)
def test_own_browser_is_let_in(headers: dict[str, str]) -> None:
    assert refusal(headers, HOSTS) is None


@pytest.mark.parametrize("headers", REFUSED)
def test_others_get_one_sentence(headers: dict[str, str]) -> None:
    why = refusal(headers, HOSTS)
    assert why is not None
    assert why.endswith(".")
    assert "\n" not in why


def test_an_empty_option_lets_the_loopback_in_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "get_option", lambda name: [])
    assert [refusal({"host": host}, allowed_hosts()) is None for host in (OWN, "localhost:1", "evil.example")] == [
        True,
        True,
        False,
    ]


def test_a_star_lets_every_host_in() -> None:
    assert refusal({"host": "anything:1"}, ["*"]) is None
    assert refusal({"host": "a\x1b[31m.example"}, HOSTS).isprintable()  # type: ignore[union-attr]
