"""A page on another port of this machine, open in the same browser, can neither drive the dashboard nor show it in a
frame nor read its files; the dashboard's own page works as it is."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, expect
from uiruns import Runs
from uiserver import Open, Server

HOSTILE = """<!doctype html><title>hostile</title><pre id="told"></pre>
<iframe id="frame" src="TARGET/" width="900" height="500"></iframe>
<script>
const told = {};
const tell = (name, what) => { told[name] = what; document.querySelector("#told").textContent = JSON.stringify(told); };
const socket = new WebSocket("TARGET/_stcore/stream".replace("http", "ws"), ["streamlit"]);
socket.onopen = () => tell("socket", "open");
socket.onerror = () => tell("socket", "refused");
fetch("TARGET/_stcore/host-config").then((answer) => tell("fetch", "read"), () => tell("fetch", "refused"));
const script = document.createElement("script");
script.src = "TARGET/static/js/none.js";
const image = new Image();
image.onload = () => tell("image", "loaded");
image.onerror = () => tell("image", "refused");
image.src = "TARGET/favicon.png";
</script>"""


@pytest.fixture
def hostile(server: Server) -> Iterator[str]:
    """Address of a server on another port whose only page attacks `server`."""

    class Attack(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(HOSTILE.replace("TARGET", server.url).encode())

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    attacker = ThreadingHTTPServer(("127.0.0.1", 0), Attack)
    threading.Thread(target=attacker.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{attacker.server_port}"
    attacker.shutdown()
    attacker.server_close()


def test_a_page_of_another_port_is_refused(browser: Browser, hostile: str, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(hostile)
    page.wait_for_function("() => ['socket', 'fetch', 'image'].every((name) => document.body.innerText.includes(name))")
    told = json.loads(page.locator("#told").inner_text())
    assert told == {"socket": "refused", "fetch": "refused", "image": "refused"}
    page.wait_for_timeout(3000)
    inside = page.frame_locator("#frame")
    expect(inside.get_by_test_id("stApp")).to_have_count(0)
    context.close()


def test_the_dashboards_own_page_and_a_link_to_it_work(open_page: Open, server: Server, runs: Runs) -> None:
    page = open_page(f"{server.url}/replay?run={runs.whole}&step=3")
    expect(page.locator("#player").last).to_be_visible()
    page.goto(f"data:text/html,<a id='go' href='{server.url}/replay?run={runs.whole}'>go</a>")
    page.locator("#go").click()
    expect(page.locator("#player").last).to_be_visible()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_pages_and_static_files_are_behind_the_same_door(server: Server, headers: dict[str, str]) -> None:
    for path in ("/", "/replay", "/_stcore/health", "/_stcore/host-config", "/favicon.png"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=600)
        assert caught.value.code == 403
        assert caught.value.read().decode().strip().endswith(".")


def test_answers_forbid_frames_of_others(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/", timeout=600) as answer:
        assert answer.headers["content-security-policy"] == "frame-ancestors 'self'"
        assert answer.headers["x-frame-options"] == "SAMEORIGIN"
