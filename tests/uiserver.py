"""A server of the dashboard for browser tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, expect
from uiruns import ROOT

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


class Server:
    """streamlit run app.py on a free port, until `stop`. warm: jobs are forked from a process that is ready. results:
    what Benchmarks shows, the repository's own unless given."""

    def __init__(self, runs: Path, warm: bool = False, results: Path | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        argv = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(self.port)]
        env = {**os.environ, "KVLENS_RUNS": str(runs), "KVLENS_WARM": "on" if warm else "off"}
        if results is not None:
            env["KVLENS_RESULTS"] = str(results)
        self._process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not become healthy")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
