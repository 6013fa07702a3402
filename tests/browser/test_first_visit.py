"""What a fresh server shows to its very first visitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server


def test_a_deep_link_is_restored_as_the_first_visit_of_a_server(
    runs: Runs, open_page: Open, start_server: Callable[[Path], Server]
) -> None:
    page = open_page(f"{start_server(runs.folder).url}/replay?run={runs.whole}&step=7&layer=2&head=5&metric=entropy")
    player = page.locator("#player")
    expect(player).to_have_attribute("data-step", "7")
    expect(player).to_have_attribute("data-cell", "2,5")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_test_id("stTopNavLink")).to_have_count(11)
    expect(page.get_by_test_id("stSidebarNav")).to_have_count(0)
    page.get_by_text("Tables of this step").click()
    expect(page.get_by_text("What L2 Q5 (KV1) attended at step 7")).to_be_visible()
