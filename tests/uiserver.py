"""A server of the dashboard for browser tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect
from uiruns import ROOT

from kvlens.lab.bench import sweepfile

Open = Callable[..., Page]
"""open_page(url, dark=False)"""


def player(page: Page) -> Locator:
    """The player of the run that the address names. While a page is being made anew the one before it is still
    there."""
    (uid,) = urllib.parse.parse_qs(urllib.parse.urlparse(page.url).query)["run"]
    return page.locator(f"#player[data-run='{uid}']").last


def settled(page: Page) -> None:
    """Returns when the page's script has been at rest for a third of a second, and what it sent is drawn."""
    app = page.get_by_test_id("stApp")
    for _ in range(300):
        expect(app).to_have_attribute("data-test-script-state", "notRunning")
        page.wait_for_timeout(300)
        if app.get_attribute("data-test-script-state") == "notRunning":
            return
    raise AssertionError("the page's script does not come to rest")


def choose(page: Page, field: Locator, name: str) -> None:
    """Chooses an option of a list by typing its name. A list that shows all scrolls to its present choice a moment
    after it opened: a click in that moment, quicker than a person's, is pressed on one option and let go on another. A
    page that scrolls closes an open list, so the field is brought to the middle first, as a person would."""
    field.evaluate("element => element.scrollIntoView({block: 'center', behavior: 'instant'})")
    page.wait_for_timeout(300)
    field.fill(name)
    page.get_by_role("option", name=name, exact=True).click()


def click_panel(page: Page, chart: Locator, panel: str | int, across: float, down: float) -> None:
    """A click at a share of the width and height of a panel of a Plotly chart (its number, or its selector), once the
    page is at rest and says what is under the pointer: a chart is drawn a second after the text below it, and hears
    clicks later still."""
    area = chart.locator(panel).first if isinstance(panel, str) else chart.locator(".nsewdrag").nth(panel)
    expect(area).to_be_attached()
    settled(page)
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] * across, box["y"] + box["height"] * down
    page.mouse.move(x, y)
    expect(chart.locator(".hoverlayer .hovertext").first).to_be_visible()
    page.mouse.click(x, y)


def download(page: Page, button: Locator, target: Path) -> str:
    """Clicks `button`, saves what it hands out as `target`; the file's suggested name.

    A file that is made on the click belongs to one run of the page's script: Streamlit answers a click during the next
    run's last moments with "Failed to generate file for download", and the second click works. A person sees that; here
    the page is at rest."""
    settled(page)
    with page.expect_download() as started:
        button.click()
    started.value.save_as(target)
    return started.value.suggested_filename


@contextmanager
def showing(runs: Path, results: Path, about: dict[str, Any], rows: list[dict[str, object]]) -> Iterator[Server]:
    """A server on a folder of runs whose Benchmarks shows one sweep; results: an empty folder."""
    sweepfile.write(results / "grid.json", about, rows)
    started = Server(runs, results=results)
    try:
        yield started
    finally:
        started.stop()


class Server:
    """streamlit run app.py on a free port, until `stop`. warm: jobs are forked from a process that is ready. results:
    what Benchmarks shows, the repository's own unless given. token: what the server asks for; 'off': nothing. port: a
    free one unless given."""

    def __init__(
        self, runs: Path, warm: bool = False, results: Path | None = None, token: str = "off", port: int | None = None
    ) -> None:
        self.runs = runs
        env = {**os.environ, "KVLENS_RUNS": str(runs), "KVLENS_WARM": "on" if warm else "off", "KVLENS_TOKEN": token}
        self._asked_port = port
        if results is not None:
            env["KVLENS_RESULTS"] = str(results)
        until = time.monotonic() + 600
        while not self._begun(env, until):  # another process took the port before the server did
            assert time.monotonic() < until, "the server did not become healthy"

    def _begun(self, env: dict[str, str], until: float) -> bool:
        """Start a server on a free port. Return False if the server ended, or was not healthy by `until`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = self._asked_port or free.getsockname()[1]
        argv = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(self.port)]
        self._process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"
        while self._process.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=1)
                return self._process.poll() is None
            except OSError:
                time.sleep(0.1)
        self._process.kill()
        return False

    def kill(self) -> None:
        """As the kernel does it: the server can do nothing any more."""
        self._process.kill()
        self._process.wait(120)

    def stop(self) -> None:
        """Once more as with Ctrl-C where it waits for a connection that the browser has kept open, as uvicorn does."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(120)
