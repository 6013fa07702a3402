"""A real server and a real Chromium. Console errors fail the test; a picture of the page is kept when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from uiruns import ROOT, Runs, write_runs
from uiserver import Open, Server

PICTURES = ROOT / "test-results"
WAIT_MS = 120_000
#: Streamlit 1.67 probes two addresses relative to a deep link's path; they are absent and nothing depends on them.
HARMLESS = ("Failed to load resource: the server responded with a status of 404",)
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--process-per-site",
)

expect.set_options(timeout=WAIT_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def server(runs: Runs) -> Iterator[Server]:
    started = Server(runs.folder)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that run models, on a folder of its own. Jobs are forked from a process that is ready."""
    started = Server(tmp_path_factory.mktemp("workshop"), warm=True)
    yield started
    started.stop()


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """A server of the test's own on a folder of runs; it ends after the test's pages."""
    servers: list[Server] = []

    def start(folder: Path, warm: bool = False) -> Server:
        servers.append(Server(folder, warm))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("KVLENS_CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield found
        found.close()


@pytest.fixture(scope="session")
def contexts(browser: Browser) -> Callable[[bool, str], BrowserContext]:
    """contexts(dark, url): one for all light and one for all dark pages, as a person's browser has it: what it was sent
    by a server once it neither asks for nor compiles again. In each a page stays open, on the server first seen: it
    keeps the process that all pages of this machine share."""
    kept: set[bool] = set()

    @cache
    def context(dark: bool) -> BrowserContext:
        return browser.new_context(
            viewport={"width": 1440, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
            accept_downloads=True,
        )

    def made(dark: bool, url: str) -> BrowserContext:
        if dark not in kept and url.startswith("http:"):
            kept.add(dark)
            context(dark).new_page().goto(urljoin(url, "/_stcore/health"))
        return context(dark)

    return made


@pytest.fixture
def open_page(
    contexts: Callable[[bool, str], BrowserContext], request: pytest.FixtureRequest, start_server: object
) -> Iterator[Open]:
    """open_page(url, dark=False): a page. At the end: no console errors, no requests to other hosts."""
    pages: list[Page] = []
    errors: list[str] = []

    def opened(url: str, dark: bool = False) -> Page:
        page = contexts(dark, url).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(f"uncaught: {error}"))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: errors.append(f"left the machine: {sent.url}") if foreign(sent.url) else None)
        page.goto(url)
        pages.append(page)
        return page

    yield opened
    failed = getattr(request.node, "failed_call", False)
    for number, page in enumerate(pages):
        if failed:
            PICTURES.mkdir(exist_ok=True)
            page.screenshot(path=str(PICTURES / f"{request.node.name}-{number}.png"))
        page.close()
    assert [text for text in errors if not text.startswith(HARMLESS)] == []


def foreign(url: str) -> bool:
    return url.startswith(("http://", "https://", "ws://", "wss://")) and "//127.0.0.1:" not in url


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.failed_call = report.failed  # type: ignore[attr-defined]
