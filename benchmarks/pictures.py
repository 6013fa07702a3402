"""The pictures of README and docs/, taken of the running dashboard in headless Chromium.

Usage: python -m benchmarks.pictures [--out docs] [--chromium PATH]. Starts the dashboard on a temporary folder with the
gallery's SnapKV loss and a small study of the demo model. Writes runs.png, replay.png, study.png and replay.gif, the
replay played from its first step."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.ui import CHROMIUM_ARGUMENTS, ROOT, start
from kvlens.app import gallery

WIDTH, HEIGHT = 1440, 900
LOSS = next(loss for loss in gallery.losses() if loss.method == "snapkv")
STUDY = [
    "needle@length=512@prompts=12",
    "--methods",
    "snapkv,streaming_llm",
    "--budgets",
    "20%,40%,60%",
    "--model",
    "demo",
]
STEPS = 7
"""steps that the moving picture shows"""
MOVING_WIDTH = 960
"""pixels of the moving picture"""


def study(runs: Path) -> str:
    """Run a small study of the demo model and return its id."""
    argv = [sys.executable, "-m", "kvlens", "study", *STUDY, "--name", "SnapKV and StreamingLLM", "--runs", str(runs)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.split()[-1]


def played(page: Any, steps: int) -> list[Image.Image]:
    """Step through the replay and return a picture of each step."""
    frames = []
    page.locator("#player").last.evaluate("player => player.focus({ preventScroll: true })")
    page.keyboard.press("Home")
    for _ in range(steps):
        page.wait_for_timeout(700)
        page.get_by_test_id("stMain").evaluate("main => main.scrollTo(0, 0)")
        frame = Image.open(io.BytesIO(page.screenshot()))
        height = round(frame.height * MOVING_WIDTH / frame.width)
        frames.append(frame.convert("RGB").resize((MOVING_WIDTH, height), Image.Resampling.LANCZOS).quantize(96))
        page.keyboard.press("ArrowRight")
    return frames


def take(url: str, uid: str, runs: Path, out: Path, chromium: str) -> None:
    """Take all pictures. The study runs after the others, so that the list of runs is short."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(120_000)
        page.add_init_script("window.localStorage.setItem('kvlens-marks-left', '1')")
        page.goto(url)
        page.get_by_text("A click on a run opens it").wait_for()
        page.wait_for_timeout(5000)
        page.screenshot(path=out / "runs.png")
        page.goto(f"{url}/replay?run={uid}")
        page.locator("#player[data-step]").wait_for()
        page.wait_for_timeout(4000)
        page.screenshot(path=out / "replay.png")
        frames = played(page, STEPS)
        frames[0].save(out / "replay.gif", save_all=True, append_images=frames[1:], duration=900, loop=0, optimize=True)
        page.goto(f"{url}/study?study={study(runs)}")
        page.get_by_text("Every trial").wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=out / "study.png")
        browser.close()


def main() -> None:
    """Take the pictures once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        uid = gallery.bring(LOSS, runs)
        process, url, _ = start(runs)
        try:
            take(url, uid, runs, options.out, options.chromium)
        finally:
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    main()
