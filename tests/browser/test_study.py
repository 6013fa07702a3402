"""A study, begun by clicks, watched, and followed to the Replay behind one of its trials."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect
from uiserver import Open, Server, settled


def fill(page: Page, field: Locator, text: str) -> None:
    """Type a value without a click, and wait until the page has taken it."""
    field.fill(text)
    field.press("Enter")
    settled(page)


@pytest.mark.slow
def test_a_tau_curve_is_begun_by_at_most_five_clicks_and_ends_on_its_page(workshop: Server, open_page: Open) -> None:
    """Five clicks lead to a study of twenty prompts; with two of them, which takes no click, it is carried out."""
    page = open_page(f"{workshop.url}/study")
    page.get_by_text("A generated task").wait_for()
    page.evaluate("window.clicks = 0; addEventListener('click', event => { window.clicks += event.isTrusted }, true)")
    page.get_by_text("A generated task").click()
    settled(page)
    fill(page, page.get_by_role("spinbutton", name="Tokens of a prompt", exact=True), "128")
    page.get_by_role("combobox", name="Vary a parameter").click()
    page.keyboard.type("FreeKV: tau")
    page.keyboard.press("Enter")
    settled(page)
    fill(page, page.get_by_role("textbox", name="Its values"), "0.5, 0.9")
    fill(page, page.get_by_role("textbox", name="Budgets"), "40%, 60%")
    expect(page.get_by_text("20 prompts x 5 arms = 100 trials")).to_be_visible()
    fill(page, page.get_by_role("spinbutton", name="Prompts", exact=True), "2")
    expect(page.get_by_text("2 prompts x 5 arms = 10 trials")).to_be_visible()
    page.get_by_role("button", name="Run the study").click()
    expect(page.get_by_text("10 of 10 trials have ended")).to_be_visible(timeout=300_000)
    expect(page.get_by_text("Every arm").first).to_be_visible()
    assert "study=" in page.url
    settled(page)
    curve = page.locator(".js-plotly-plot").first
    expect(curve).to_be_visible()
    expect(curve.get_by_text("tau", exact=True)).to_be_visible()
    assert page.evaluate("window.clicks") <= 5
    assert len(list((workshop.runs / "study").iterdir())) == 1
