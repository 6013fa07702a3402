"""Three browsers on one server: they start the same run, watch it and cancel one another; the server is killed between
two of them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from uiserver import Server, settled

WAIT_MS = 240_000


@pytest.fixture
def contexts(browser: Browser) -> Iterator[list[BrowserContext]]:
    """Three browsers that know nothing of each other."""
    made = [browser.new_context() for _ in range(3)]
    yield made
    for context in made:
        context.close()


def form(context: BrowserContext, server: Server) -> Page:
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{server.url}/run")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=WAIT_MS)
    settled(page)
    return page


def job_in(page: Page) -> str:
    expect(page).to_have_url(re.compile(r"[?&]job=[0-9a-f]{8}"), timeout=WAIT_MS)
    return urllib.parse.parse_qs(urllib.parse.urlparse(page.url).query)["job"][0]


def pause(folder: Path, job: str) -> int:
    """Stop the process of a job where it is, so that it goes on as long as the test needs; its id."""
    until = time.monotonic() + 600
    while True:
        assert time.monotonic() < until
        try:
            process = json.loads((folder / "jobs" / f"{job}.json").read_bytes())["process"]
        except OSError:
            process = None
        if process is not None:
            os.kill(process["pid"], signal.SIGSTOP)
            return int(process["pid"])
        time.sleep(0.02)


def all_show(pages: list[Page], text: str) -> None:
    for page in pages:
        expect(page.get_by_text(re.compile(text)).first).to_be_visible(timeout=WAIT_MS)


@pytest.mark.slow
def test_sessions_share_one_job_and_any_of_them_cancels_it(contexts: list[BrowserContext], tmp_path: Path) -> None:
    server = Server(tmp_path)
    paused = None
    try:
        pages = [form(context, server) for context in contexts]
        pages[0].get_by_role("button", name="Run", exact=True).click()
        job = job_in(pages[0])
        paused = pause(tmp_path, job)
        pages[1].get_by_role("button", name="Run", exact=True).click()
        assert job_in(pages[1]) == job, "the same run is not queued once more"
        pages[2].goto(f"{server.url}/run?job={job}")
        for page in pages:
            expect(page.get_by_role("button", name="Cancel")).to_be_enabled(timeout=WAIT_MS)
        pages[1].get_by_role("button", name="Cancel").click()
        all_show(pages, "Stopping; what was recorded is being stored")
        for page in (pages[0], pages[2]):
            expect(page.get_by_role("button", name="Cancel")).to_be_disabled(timeout=WAIT_MS)
        os.kill(paused, signal.SIGCONT)
        all_show(pages, r"Cancelled after \d")
        assert not list((tmp_path / "jobs").iterdir())

        page = form(contexts[0], server)
        page.get_by_role("button", name="Run", exact=True).click()
        again = job_in(page)
        assert again != job
        paused = pause(tmp_path, again)
        server.kill()
        server = Server(tmp_path, port=server.port)
        other = contexts[2].new_page()
        other.goto(f"{server.url}/run?job={again}")
        expect(other.get_by_role("button", name="Cancel")).to_be_enabled(timeout=WAIT_MS)
        other.get_by_role("button", name="Cancel").click()
        os.kill(paused, signal.SIGCONT)
        page.goto(f"{server.url}/run?job={again}")
        all_show([page, other], r"Cancelled after \d")
    finally:
        server.stop()
        if paused is not None:
            try:
                os.killpg(paused, signal.SIGKILL)
            except ProcessLookupError:
                paused = None
