"""What pages cost with heads by the thousand: bytes sent, seconds until the page rests, frames per second.

    python -m benchmarks.wide_pages [--shapes 32x32,80x64] [--steps 200] [--spans 2000] [--tokens 32000]
        [--pages replay] [--loads 2] [--menu] [--pictures FOLDER] [--runs FOLDER]

Writes a made-up run of each shape (layers x query heads, 8 KV heads) into --runs, a temporary folder unless given. A
run that is already there is not written again. Opens each page in headless Chromium with software rendering. The first
load of a page finds nothing in the browser's cache; later loads are new tabs of the same window. With --menu, one tab
goes from page to page by clicks in the menu, `loads` times, and `ready_s` counts from the click. Prints a JSON object
per shape, page and load: `sent_mb`, what the server sent over the page's socket; `ready_s`, until the page rests;
`errors`, what the console said. In a tab of its own, Replay adds frames per second: `play_fps`, steps that were drawn
while playing at 60; `map_fps`, frames in which the cache map is drawn anew for another range of tokens; `heads_fps`,
for another head.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from benchmarks.ui import CHROMIUM_ARGUMENTS, PLAY, start
from tests.synthetic.wide import write_wide

PAGES = ("replay", "spans", "heads", "memory", "method", "compare")
KV_HEADS = 8
MOVE = """(keys) => new Promise((resolve) => {
  const host = [...document.querySelectorAll('*')].find((e) => e.shadowRoot && e.shadowRoot.querySelector('#player'));
  const began = performance.now();
  let count = 0;
  const look = () => {
    if (count === 60) {
      resolve(count / ((performance.now() - began) / 1000));
      return;
    }
    document.dispatchEvent(new KeyboardEvent('keydown', { key: keys[count % keys.length], bubbles: true }));
    count += 1;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})"""

STILL = """() => {
  const app = document.querySelector('[data-testid=stApp]');
  const now = performance.now();
  window.clicked ??= 0;
  const rests = app && app.getAttribute('data-test-script-state') === 'notRunning';
  const empty = '[data-testid=stSkeleton], [data-testid=stPlotlyChart]:not(:has(.main-svg))';
  const waits = document.querySelector(empty) || now - window.clicked < 150;
  const still = rests && !waits && now - window.looked < 100;
  window.looked = now;
  if (!still) window.restSince = null;
  else window.restSince ??= now;
  return still && now - window.restSince > 500;
}"""
"""A click's script has begun after 150 ms."""


def wait_until_still(page: Page) -> float:
    """Return the seconds from the navigation, or the last click in the menu, to the moment from which the page's script
    rests, every chart is drawn and frames come without a pause of a tenth of a second, for half a second."""
    page.wait_for_function(STILL)
    return float(page.evaluate("window.restSince - window.clicked")) / 1000


def measure_frames(page: Page) -> dict[str, float]:
    """Return frames per second of Replay's player: playing, moving the cache map, selecting heads."""
    page.locator("#rate").select_option("60")
    page.keyboard.press("Home")
    page.wait_for_timeout(1000)
    played = page.evaluate(PLAY)
    figures = {"play_fps": played["drawn"] / played["seconds"], "play_steps_s": played["steps"] / played["seconds"]}
    page.keyboard.press("w")
    page.keyboard.press("w")
    for name, keys in (("map_fps", ["a", "d"]), ("heads_fps", ["]", "["])):
        figures[name] = page.evaluate(MOVE, keys)
    return {name: round(value, 1) for name, value in figures.items()}


def measure_page(context: BrowserContext, url: str, name: str, picture: Path | None) -> dict[str, Any]:
    """Open a page in a new tab and return its figures."""
    page = context.new_page()
    page.set_default_timeout(240_000)
    sent: list[int] = []
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: sent.append(len(frame))))
    page.goto(url)
    if name == "replay":
        page.locator("#player[data-step]").wait_for()
    ready = wait_until_still(page)
    exceptions = page.get_by_test_id("stException").count() + page.get_by_test_id("stAlertContentError").count()
    figures: dict[str, Any] = {"ready_s": round(ready, 2), "sent_mb": round(sum(sent) / 1e6, 2)}
    figures |= {"frames": len(sent), "errors": errors, "exceptions": exceptions}
    if name == "replay":
        figures |= measure_frames(page)
    if picture is not None:
        page.screenshot(path=str(picture), full_page=True)
    page.close()
    return figures


def measure_clicks(
    browser: Browser, url: str, uid: str, names: Sequence[str], loads: int
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Go from page to page by clicks in the menu of one tab, which begins with Heads. Yield the page, the number of the
    visit and its figures. Compare is not visited: it shows nothing until runs are chosen."""
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(240_000)
        page.goto(f"{url}/heads?run={uid}")
        wait_until_still(page)
        for load in range(1, loads + 1):
            for name in names:
                link = page.get_by_role("link", name=name.capitalize(), exact=True)
                page.evaluate("window.clicked = performance.now()")
                link.click()
                page.wait_for_url(f"**/{name}*run={uid}*")
                if name == "replay":
                    page.locator("#player[data-step]").wait_for()
                ready = wait_until_still(page)
                exceptions = page.get_by_test_id("stException").count()
                yield name, load, {"ready_s": round(ready, 2), "exceptions": exceptions}


def measure_loads(
    browser: Browser, url: str, name: str, loads: int, picture: Path | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Open a page `loads` times in one browser window. Yield the number of each load and its figures. The window keeps
    the files that it has loaded."""
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        for load in range(1, loads + 1):
            yield load, measure_page(context, url, name, picture)


def main() -> None:
    """Write the runs, open the pages and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="32x32,80x64")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--spans", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--pages", default=",".join(PAGES))
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--menu", action="store_true")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        runs = options.runs or Path(temporary)
        shapes = {}
        for number, shape in enumerate(options.shapes.split(",")):
            layers, heads = (int(text) for text in shape.split("x"))
            uid = f"20260101-{number:06}-w{shape}"
            shapes[shape] = uid
            if not (runs / uid / "trace.duckdb").is_file():
                size = (layers, heads, KV_HEADS, options.steps, options.spans, options.tokens)
                write_wide(runs, *size, uid=uid, seed=number)
        browser = playwright.chromium.launch(executable_path=options.chromium, args=CHROMIUM_ARGUMENTS)
        process, url, _ = start(runs)
        try:
            for shape, uid in shapes.items() if options.menu else ():
                names = [name for name in options.pages.split(",") if name != "compare"]
                for name, load, figures in measure_clicks(browser, url, uid, names, options.loads):
                    about = {"shape": shape, "page": name, "click": load, "machine_load": os.getloadavg()[0]}
                    print(json.dumps(about | figures), flush=True)
            for shape, uid in shapes.items() if not options.menu else ():
                for name in options.pages.split(","):
                    query = f"?runs={uid},{uid}" if name == "compare" else f"?run={uid}"
                    picture = options.pictures and options.pictures / f"{shape}-{name}.png"
                    for load, figures in measure_loads(browser, f"{url}/{name}{query}", name, options.loads, picture):
                        about = {"shape": shape, "page": name, "load": load, "machine_load": os.getloadavg()[0]}
                        print(json.dumps(about | figures), flush=True)
        finally:
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    main()
