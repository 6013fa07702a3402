"""The first minute, in a browser: from an empty folder to a recorded loss of the gallery; and to a lost answer that a
click brings back, on the default model.

Usage: python -m benchmarks.story [--gallery] [--chromium PATH] [--out FILE]. Starts the app on a temporary
folder, clicks what a person clicks and prints one JSON object, or writes it: clicks, seconds from each click to what
it is for, and what the page says then, which README quotes. Wall clock on this machine, under whatever else it does
(load is printed)."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ui import CHROMIUM_ARGUMENTS, start
from kvlens.models.device import machine
from kvlens.models.find import default_model


def time_story(url: str, chromium: str) -> dict[str, Any]:
    """Seconds of the story: to the first page, from the sample's click to its verdict, from a hold's to its outcome."""
    from playwright.sync_api import sync_playwright

    mapping: dict[str, Any] = {"clicks": 1 + 1}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(300_000)

        def seconds(act: Callable[[], object], until: Callable[[], object]) -> float:
            start_time = time.perf_counter()
            act()
            until()
            return round(time.perf_counter() - start_time, 1)

        sample = page.get_by_role("button", name=re.compile("Watch a real model|Run the sample prompt"))
        mapping["first_page_s"] = seconds(lambda: page.goto(url), sample.wait_for)
        mapping["lost_s"] = seconds(
            sample.click, page.get_by_text(re.compile("Lost at step|Nothing was lost")).wait_for
        )
        page.wait_for_timeout(2000)
        mapping["verdict"] = page.locator(".st-key-verdict").inner_text()
        hold, tries = page.get_by_role("button", name="Hold it resident"), page.get_by_text("Answer with it held")
        if hold.count():
            mapping["held_s"] = [seconds(hold.click, tries.wait_for)]
            page.wait_for_timeout(2000)
            again = page.get_by_text("All tries on this run (2)")
            mapping["held_s"].append(seconds(hold.click, again.wait_for))
            mapping["restored"] = page.get_by_test_id("stMetric").first.inner_text().split()[-1]
            mapping["tried"] = page.locator(".st-key-tried").inner_text()
        browser.close()
    return mapping


def time_cards(url: str, chromium: str) -> dict[str, Any]:
    """Seconds from the click on a card of the gallery to its verdict and what holding gave back, and to the first of
    the marks, which waits until the page stands still; of the first card and, with the page's code loaded, of the
    second."""
    from playwright.sync_api import sync_playwright

    took: list[list[float]] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        for card in range(2):
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.set_default_timeout(60_000)
            page.goto(url)
            if card:
                page.get_by_text("Recorded losses of").click()
            button = page.get_by_role("button", name=re.compile("^Open .* loss$")).nth(card)
            button.wait_for()
            page.wait_for_timeout(3000)
            start_time = time.perf_counter()
            button.click()
            page.get_by_text("Answer with it held").wait_for()
            page.locator("#player[data-step]").wait_for()
            verdict_s = time.perf_counter() - start_time
            page.locator("#box").wait_for(state="visible")
            took.append([round(verdict_s, 1), round(time.perf_counter() - start_time, 1)])
            page.close()
        browser.close()
    return {"gallery_s": [verdict_s for verdict_s, _ in took], "marks_s": [marked for _, marked in took]}


def main() -> None:
    """Tells the story once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gallery", action="store_true", help="the gallery alone; no model is loaded")
    options = parser.parse_args()
    mapping: dict[str, Any] = {}
    for tell in [time_cards] if options.gallery else [time_cards, time_story]:
        with tempfile.TemporaryDirectory() as folder:
            process, url, health = start(Path(folder))
            try:
                mapping |= {"health_s": round(health, 2)} | tell(url, options.chromium)
            finally:
                process.terminate()
                process.wait(20)
    about = {
        "model": default_model(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_average": round(os.getloadavg()[0], 2),
    }
    text = json.dumps({**about, **mapping}, ensure_ascii=False, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
