"""How fast the dashboard is: from `streamlit run` to health and to the first page, and what the player draws per
second.

Usage: python benchmarks/ui.py [--steps 512] [--layers 32] [--heads 32] [--chromium PATH]. Writes a made-up run into a
temporary folder and prints one JSON object. Times are wall-clock seconds on this machine, under whatever else it does
(load is printed)."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
PLAY = """() => new Promise((resolve) => {
  const host = [...document.querySelectorAll('*')].find((e) => e.shadowRoot && e.shadowRoot.querySelector('#player'));
  const player = host.shadowRoot.querySelector('#player');
  const first = Number(player.dataset.frames), began = performance.now(), from = Number(player.dataset.step);
  host.shadowRoot.querySelector('#play').click();
  const playing = () => player.dataset.playing === 'true' && performance.now() - began < 10000;
  const look = () => playing() ? requestAnimationFrame(look)
    : resolve({ seconds: (performance.now() - began) / 1000, drawn: Number(player.dataset.frames) - first,
                steps: Number(player.dataset.step) - from });
  requestAnimationFrame(look);
})"""


def start(runs: Path) -> tuple[subprocess.Popen[bytes], str, float]:
    """A server, its address and the seconds until it was healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_time = time.perf_counter()
    argv = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, "KVLENS_RUNS": str(runs), "KVLENS_TOKEN": "off"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(f"{url}/_stcore/health", timeout=1)
            return process, url, time.perf_counter() - start_time
        except OSError:
            time.sleep(0.02)


def look(url: str, uid: str, chromium: str) -> dict[str, Any]:
    """First page, first replay, and ten seconds of playing at most."""
    from playwright.sync_api import sync_playwright

    figures: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        start_time = time.perf_counter()
        page.goto(url)
        page.get_by_text("A click on a run opens it").wait_for()
        figures["first_page_s"] = round(time.perf_counter() - start_time, 2)
        start_time = time.perf_counter()
        page.goto(f"{url}/replay?run={uid}")
        page.locator("#player[data-step]").wait_for()
        figures["replay_ready_s"] = round(time.perf_counter() - start_time, 2)
        page.wait_for_timeout(2000)
        for mode in ("surprisal", "mean"):
            page.locator("#mode").select_option(mode)
            page.locator("#rate").select_option("60")
            page.keyboard.press("Home")
            page.wait_for_timeout(500)
            played = page.evaluate(PLAY)
            page.wait_for_timeout(1000)
            figures[f"played_{mode}"] = {
                "steps_per_s": round(played["steps"] / played["seconds"], 1),
                "drawn_per_s": round(played["drawn"] / played["seconds"], 1),
            }
        browser.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    from kvlens.player import payload
    from kvlens.store.reader import TraceReader
    from tests.synthetic import write_synthetic

    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        uid = write_synthetic(
            runs, options.layers, options.heads, max(1, options.heads // 4), options.steps, 120, 0, prompt_tokens=3000
        )
        with TraceReader.open(runs, uid) as reader:
            start_time = time.perf_counter()
            names = payload.per_step_metrics(reader)
            message = payload.run_payload(reader, "bench", names, payload.loaded_metrics(reader, names, None))
            built = time.perf_counter() - start_time
        process, url, health = start(runs)
        try:
            figures = look(url, uid, options.chromium)
        finally:
            process.terminate()
            process.wait(20)
    shape = f"{options.steps} steps x {options.layers} layers x {options.heads} query heads, 3000 prompt tokens"
    print(
        json.dumps(
            {
                "run": shape,
                "load_average": os.getloadavg()[0],
                "health_s": round(health, 2),
                **figures,
                "payload_mb": round(len(message) / 1e6, 2),
                "payload_built_s": round(built, 2),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
