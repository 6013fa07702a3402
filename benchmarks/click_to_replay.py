"""Seconds from the click on *Run* to the open Replay, in a real browser: a prompt file, SmolLM2, a cold server.

Usage: python benchmarks/click_to_replay.py PROMPT.json [--method "SnapKV · prompt eviction"] [--typing 10] [--times 1]
[--app FOLDER]. The prompt is uploaded and the form filled; the click comes `--typing` seconds later. `--app` is the
checkout whose app is measured: one script compares two checkouts. Each time is [seconds by the clock, processor seconds
of the server and of all processes that it began]. Prints a JSON object per run. Needs playwright and Chromium."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

TICKS = os.sysconf("SC_CLK_TCK")
WAIT_MS = 600_000
CHROMIUM = os.environ.get("KVLENS_CHROMIUM", "/usr/bin/chromium")


def processor_s(root: int) -> float:
    """Return the processor seconds of a process and all that it began, ended ones included."""
    times, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        parents[pid], times[pid] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    total = 0.0
    for pid, spent in times.items():
        ancestor = pid
        while ancestor not in (root, 0, 1):
            ancestor = parents.get(ancestor, 0)
        total += spent if ancestor == root else 0.0
    return total


def settled(page: Page) -> None:
    """Wait until the page's script is at rest."""
    for _ in range(600):
        expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning", timeout=WAIT_MS)
        page.wait_for_timeout(300)
        if page.get_by_test_id("stApp").get_attribute("data-test-script-state") == "notRunning":
            return


def measure(page: Page, url: str, server: int, options: argparse.Namespace) -> dict[str, object]:
    """Return the times of one run, from a new page on."""
    page.goto(f"{url}/run", timeout=WAIT_MS)
    settled(page)
    page.get_by_text("Upload", exact=True).click()
    page.locator("input[type=file]").set_input_files(str(options.prompt))
    settled(page)
    if options.method:
        page.get_by_role("combobox", name=re.compile("^Method")).first.fill(options.method)
        page.get_by_role("option", name=options.method, exact=True).click()
        settled(page)
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=WAIT_MS)
    page.wait_for_timeout(1000 * options.typing)
    load, clock, spent = os.getloadavg()[0], time.monotonic(), processor_s(server)
    times: dict[str, object] = {"method": options.method, "app": str(options.app), "load": round(load, 1)}

    def note(place: str) -> None:
        times[place] = [round(time.monotonic() - clock, 1), round(processor_s(server) - spent, 1)]

    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#race")).to_have_attribute("data-lanes", "2", timeout=WAIT_MS)
    note("model and prompt are there")
    expect(page).to_have_url(re.compile(r"/replay\?run="), timeout=WAIT_MS)
    note("Replay's address")
    expect(page.locator("#player").last).to_have_attribute("data-step", re.compile(r"\d+"), timeout=WAIT_MS)
    note("Replay's player")
    settled(page)
    note("page at rest")
    return times


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--method", default="SnapKV · prompt eviction", help="'': the one that the form begins with")
    parser.add_argument("--typing", type=int, default=10, help="seconds between the filled form and the click")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--app", type=Path, default=Path(__file__).resolve().parents[1])
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as runs:
        home = {"KVLENS_RUNS": runs, "KVLENS_TOKEN": "off", "KVLENS_WARM": "on", "PYTHONPATH": str(options.app)}
        argv = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
        argv += ["--server.headless", "true"]
        quiet = subprocess.DEVNULL
        server = subprocess.Popen(argv, cwd=options.app, env={**os.environ, **home}, stdout=quiet, stderr=quiet)
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/_stcore/health", timeout=1)
                    break
                except OSError:
                    time.sleep(0.2)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                for _ in range(options.times):
                    page = browser.new_page(viewport={"width": 1400, "height": 900})
                    print(json.dumps(measure(page, url, server.pid, options), ensure_ascii=False), flush=True)
                    page.close()
                browser.close()
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
