"""A study, begun by clicks, watched, and followed to the Replay behind one of its trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect
from uiserver import Open, Server, settled


@pytest.mark.slow
def test_a_study_is_begun_by_clicks_and_ends_on_its_page(
    tmp_path: Path, open_page: Open, start_server: Callable[[Path], Server]
) -> None:
    server = start_server(tmp_path)
    page = open_page(f"{server.url}/study")
    page.get_by_text("A generated task").click()
    settled(page)
    for name, value in (("Tokens of a prompt", "128"), ("Prompts", "2")):
        field = page.get_by_role("spinbutton", name=name, exact=True)
        field.fill(value)
        field.press("Enter")
        settled(page)
    page.get_by_role("textbox", name="Budgets").fill("40%, 60%")
    page.get_by_role("textbox", name="Budgets").press("Enter")
    settled(page)
    expect(page.get_by_text("2 prompts x 3 arms = 6 trials")).to_be_visible()
    page.get_by_role("button", name="Run the study").click()
    expect(page.get_by_text("6 of 6 trials have ended")).to_be_visible(timeout=180_000)
    expect(page.get_by_text("Every arm")).to_be_visible()
    assert "study=" in page.url
    settled(page)
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    assert len(list((tmp_path / "study").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tau_curve_over_twenty_prompts_takes_at_most_five_clicks(
    tmp_path: Path, open_page: Open, start_server: Callable[[Path], Server]
) -> None:
    server = start_server(tmp_path)
    page = open_page(f"{server.url}/study")
    page.get_by_text("A generated task").wait_for()
    page.evaluate("window.clicks = 0; addEventListener('click', event => { window.clicks += event.isTrusted }, true)")
    page.get_by_text("A generated task").click()
    settled(page)
    length = page.get_by_role("spinbutton", name="Tokens of a prompt", exact=True)
    length.fill("128")
    length.press("Enter")
    settled(page)
    page.get_by_role("combobox", name="Vary a parameter").click()
    page.keyboard.type("FreeKV: tau")
    page.keyboard.press("Enter")
    settled(page)
    values = page.get_by_role("textbox", name="Its values")
    values.fill("0.5, 0.7, 0.9")
    values.press("Enter")
    settled(page)
    budgets = page.get_by_role("textbox", name="Budgets")
    budgets.fill("60%")
    budgets.press("Enter")
    settled(page)
    expect(page.get_by_text("20 prompts x 4 arms = 80 trials")).to_be_visible()
    page.get_by_role("button", name="Run the study").click()
    expect(page.get_by_text("80 of 80 trials have ended")).to_be_visible(timeout=600_000)
    settled(page)
    curve = page.locator(".js-plotly-plot").first
    expect(curve).to_be_visible()
    expect(curve.get_by_text("tau", exact=True)).to_be_visible()
    assert page.evaluate("window.clicks") <= 5
