"""How long the pages take to load where there are many runs, in a browser.

Usage: python -m benchmarks.manyruns [--runs 100] [--with FOLDER] [--loads 5] [--chromium PATH]. Writes made-up runs of
a dozen prompts into a temporary folder, beside copies of the runs in FOLDER, starts the app on it and prints one JSON
object. Per page: seconds from its address to its content with the script at rest, of the first load by a server that
has just begun and of later ones, and what the server computed for each (CPU seconds). Wall clock on this machine, under
whatever else it does (load is printed)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ui import CHROMIUM_ARGUMENTS, start
from kvlens import methods
from kvlens.models.device import machine
from kvlens.store.reader import list_runs
from tests.synthetic import write_synthetic

PROMPTS = 12
RESTS = "[data-testid=stApp][data-test-script-state=notRunning]"
CONTENT = {
    "": "[data-testid=stDataFrame]",
    "replay": "#player[data-step]",
    "compare": "#player[data-step]",
    "heads": "[data-testid=stPlotlyChart] .main-svg",
}


def write(folder: Path, count: int) -> None:
    """Made-up runs, every second of which lost, each method on each prompt in turn."""
    names = [entry["name"] for entry in methods.catalogue()]
    for number in range(count):
        write_synthetic(
            folder,
            uid=f"20260101-{number:06}-{number % 100:02}many",
            seed=number % PROMPTS,
            steps=48,
            loss_step=24 if number % 2 else 48,
            method=names[number % len(names)],
            prompt_text=f"Prompt {number % PROMPTS}. " + "The river was wide and the bridge was old. " * 60,
            answer="bridge",
            output_text=" bridge" if number % 3 else " river",
        )


def loads(url: str, chromium: str, times: int, server: int) -> dict[str, Any]:
    """Seconds per page: the first load and the later ones. server: its process."""
    from playwright.sync_api import sync_playwright

    mapping: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.set_default_timeout(120_000)
        for name, content in CONTENT.items():
            took, computed = [], []
            for _ in range(times + 1):
                page.goto("about:blank")
                start_time, previous = time.perf_counter(), cpu(server)
                page.goto(f"{url}/{name}")
                page.locator(content).first.wait_for()
                page.locator(RESTS).wait_for()
                took.append(round(time.perf_counter() - start_time, 2))
                computed.append(round(cpu(server) - previous, 2))
            mapping[name or "home"] = {
                "first_s": took[0],
                "first_cpu_s": computed[0],
                "warm_s": took[1:],
                "median_s": statistics.median(took[1:]),
                "median_cpu_s": statistics.median(computed[1:]),
            }
        browser.close()
    return mapping


def cpu(process: int) -> float:
    """Seconds that a process has computed so far, all its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Writes the runs and loads the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--with", dest="beside", type=Path, help="a folder whose runs are copied beside the made-up ones"
    )
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        if options.beside is not None:
            shutil.copytree(options.beside, folder, ignore=shutil.ignore_patterns(".*"))
        write(folder, options.runs)
        present = len(list_runs(folder))
        process, url, health = start(folder)
        try:
            results = loads(url, options.chromium, options.loads, process.pid)
        finally:
            process.terminate()
            process.wait(20)
    about = {"runs": present, "machine": machine(), "load_average": round(os.getloadavg()[0], 2)}
    print(json.dumps({**about, "health_s": round(health, 2), **results}, indent=1))


if __name__ == "__main__":
    main()
