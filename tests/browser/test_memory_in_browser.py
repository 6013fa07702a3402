"""The Memory page in a browser: it opens, a click on a map selects the KV head, the timeline can be taken away."""

from __future__ import annotations

import json
import re
from pathlib import Path

from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, download


def test_a_click_on_the_map_selects_the_kv_head_and_the_timeline_downloads(
    server: Server, runs: Runs, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(f"{server.url}/memory?run={runs.whole}&layer=0&head=0&steps=2-5")
    expect(page.get_by_text("Steps 2–5: copies beside the steps they ran with")).to_be_visible()
    expect(page.get_by_text("State of spans for L0 KV0 at the end of each step")).to_be_visible()
    chart = page.get_by_test_id("stPlotlyChart").filter(has_text="On the device, mean over all steps")
    chart.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    box = chart.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    where = box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 2.5 / 3
    page.mouse.move(*where)
    page.wait_for_timeout(300)
    page.mouse.click(*where)
    expect(page.get_by_text("selected: L2 KV1")).to_be_visible()
    expect(page.get_by_text("State of spans for L2 KV1 at the end of each step")).to_be_visible()
    expect(page).to_have_url(re.compile("layer=2&head=4"))
    target = tmp_path / "trace.json"
    download(page, page.get_by_role("button", name="Chrome trace (JSON)"), target)
    assert json.loads(target.read_text(encoding="utf-8"))["otherData"]["run"] == runs.whole
