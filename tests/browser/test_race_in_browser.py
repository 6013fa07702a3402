"""A race of three methods, begun, watched and opened again in a browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from uiserver import Open, Server, choose, settled


@pytest.mark.slow
def test_a_race_is_begun_watched_and_opened_again(workshop: Server, open_page: Open) -> None:
    page = open_page(f"{workshop.url}/run")
    field = page.get_by_role("combobox", name="Race against")
    expect(field).to_be_visible()
    settled(page)
    for title in ("SnapKV", "StreamingLLM"):
        choose(page, field, title)
        settled(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Race 3 methods").click()

    race = page.locator("#race")
    expect(race).to_have_attribute("data-lanes", "4")
    page.reload()  # a tab that is closed loses nothing
    expect(race).to_have_attribute("data-over", "yes")
    settled(page)
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(4)
    lost = page.locator(".lane[data-lost=yes]").first
    expect(lost).to_contain_text("left full KV at step")
    expect(lost.locator(".parted")).to_have_count(1)
    expect(lanes.first).to_contain_text("right answer")
    expect(page.locator("#play")).to_have_text("Play")  # the clock has come to the last step
    longest = int(race.get_attribute("data-step") or 0)
    assert longest > 0

    page.locator("#scrub").fill("0")
    expect(race).to_have_attribute("data-step", "0")
    before = int(race.get_attribute("data-drawn") or 0)
    page.locator("#play").click()
    expect(race).to_have_attribute("data-step", str(longest))
    drawn = int(race.get_attribute("data-drawn") or 0) - before
    assert drawn >= longest, "every step was drawn"

    page.get_by_role("link", name="Link to this race").click()
    expect(page).to_have_url(re.compile(r"/run\?race=\d{8}-\d{6}-[0-9a-f]{9}$"))
    expect(race).to_have_attribute("data-over", "yes")
    settled(page)
    expect(page.get_by_text("methods left full KV")).to_be_visible()
    page.get_by_role("link", name="Open as comparison").click()
    expect(page.locator(".answers tbody tr")).to_have_count(4)
    expect(page.get_by_text("The lanes of a race, budget")).to_be_visible()
    settled(page)
    page.get_by_role("link", name="Back to the lanes").click()
    expect(race).to_have_attribute("data-over", "yes")
    settled(page)
    page.locator(".lane[data-lost=yes]").first.click()
    expect(page).to_have_url(re.compile(r"/replay\?run="))
    expect(page.locator("#player")).to_have_attribute("data-step", re.compile(r"\d+"))
