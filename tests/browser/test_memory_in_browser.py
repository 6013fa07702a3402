"""The Memory page in a browser: it opens, a click on a map selects the KV head, the timeline can be taken away."""

from __future__ import annotations

import json
import re
from pathlib import Path

from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, click_panel, download


def test_a_click_on_the_map_selects_the_kv_head_and_the_timeline_downloads(
    server: Server, runs: Runs, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(f"{server.url}/memory?run={runs.whole}&layer=0&head=0&steps=2-5")
    expect(page.get_by_text("Steps 2–5: copies beside the steps they ran with")).to_be_visible()
    expect(page.get_by_text("State of spans for L0 KV0 at the end of each step")).to_be_visible()
    chart = page.get_by_test_id("stPlotlyChart").filter(has_text="On the device, mean over all steps")
    click_panel(page, chart, 0, 0.75, 2.5 / 3)
    expect(page.get_by_text("selected: L2 KV1")).to_be_visible()
    expect(page.get_by_text("State of spans for L2 KV1 at the end of each step")).to_be_visible()
    expect(page).to_have_url(re.compile("layer=2&head=4"))
    target = tmp_path / "trace.json"
    download(page, page.get_by_role("button", name="Chrome trace (JSON)"), target)
    assert json.loads(target.read_text(encoding="utf-8"))["otherData"]["run"] == runs.whole
