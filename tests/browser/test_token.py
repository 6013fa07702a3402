"""A browser and the token: the form, the cookie, a restarted server, and a page's file that is started alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from uiruns import ROOT, Runs
from uiserver import Server, settled

TOKEN = "the token of one server"


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that was never here."""
    made = browser.new_context()
    yield made
    made.close()


def test_a_browser_gets_in_with_the_token_and_stays_in(
    context: BrowserContext, browser: Browser, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    server = Server(runs.folder, token=TOKEN)
    try:
        page = context.new_page()
        answer = page.goto(f"{server.url}/replay?run={runs.whole}&step=3")
        assert answer is not None
        assert answer.status == 403
        page.get_by_label("Token").fill("not it, though long enough")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#player").last).to_be_visible(timeout=120_000)
        assert "token" not in page.url
        assert f"run={runs.whole}" in page.url
        settled(page)
        media = page.evaluate("() => performance.getEntriesByType('resource').map((entry) => entry.name)")
        stranger = [name for name in media if name.startswith(server.url) and not name.endswith("/_stcore/health")]
        assert len(stranger) > 5
        assert {_status(name) for name in stranger} == {403}, "none of what the page is made of is there without it"
        other = browser.new_context().new_page()
        other.goto(f"{server.url}/_stcore/health")
        script = "(url) => new Promise((tell) => { const socket = new WebSocket(url, ['streamlit']);"
        script += "socket.onopen = () => tell('open'); socket.onerror = () => tell('refused'); })"
        stream = server.url.replace("http", "ws") + "/_stcore/stream"
        assert other.evaluate(script, stream) == "refused"
        assert page.evaluate(script, stream) == "open"
        other.context.close()
        server.kill()
        server = Server(runs.folder, token=TOKEN[::-1], port=server.port)
        page.goto(f"{server.url}/replay?run={runs.whole}")
        expect(page.locator("#player").last).to_be_visible(timeout=120_000)
    finally:
        server.stop()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=600) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_pages_file_alone_shows_nothing_and_listens_on_the_loopback(
    context: BrowserContext, runs: Runs, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "streamlit", "run", str(ROOT / "pages" / "replay.py"), "--server.port", str(port)]
    environment = {**os.environ, "KVLENS_RUNS": str(runs.folder), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while _health(port) != 200:
                assert process.poll() is None
                time.sleep(0.1)
            listening = _listening(port)
            assert listening == {"0100007F"}
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{port}/?run={runs.whole}")
            expect(page.get_by_test_id("stText")).to_have_text(re.compile(r"kvlens app"), timeout=120_000)
            settled(page)
            assert page.locator("#player, [data-testid='stPageLink'], [data-testid='stAlert']").count() == 0
        finally:
            process.terminate()


def _health(port: int) -> int:
    try:
        return _status(f"http://127.0.0.1:{port}/_stcore/health")
    except OSError:
        return 0


def _listening(port: int) -> set[str]:
    """Return the addresses, as the kernel prints them, on which somebody listens at this port."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        if (file := Path("/proc/net") / table).exists()
        for line in file.read_text(encoding="ascii").splitlines()[1:]
    ]
    return {local.split(":")[0] for _, local, _, state, *_ in lines if state == "0A" and local.endswith(f":{port:04X}")}
