"""A single run, watched token by token in a browser; where it leads, and the form that begins the next one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from uiserver import Open, Server, choose, player, settled

from kvlens.store.reader import TraceReader


@pytest.mark.slow
def test_an_uploaded_prompt_is_watched_and_opens_where_it_lost(
    tmp_path: Path, open_page: Open, workshop: Server
) -> None:
    prompt = tmp_path / "own.json"
    text = "The farmer carried the copper kettle to the old harbor. " * 24
    prompt.write_text(json.dumps({"text": text, "answer": "harbor"}), encoding="utf-8")
    page = open_page(f"{workshop.url}/run")
    page.get_by_text("Upload", exact=True).click()
    page.locator("input[type=file]").set_input_files(str(prompt))
    expect(page.get_by_text("Expected answer: harbor")).to_be_visible()
    settled(page)
    page.get_by_role("link", name="Memory").click()
    settled(page)
    page.get_by_role("link", name="New run").click()
    expect(page.get_by_text("In use: own.json")).to_be_visible()  # the upload survives leaving the page
    settled(page)
    choose(page, page.get_by_role("combobox", name=re.compile("^Method")), "StreamingLLM · decode eviction")
    settled(page)
    budget = page.get_by_role("textbox", name="Budget")
    budget.fill("10%")
    budget.press("Enter")
    settled(page)
    page.get_by_role("button", name="Run", exact=True).click()

    race = page.locator("#race")
    expect(race).to_have_attribute("data-lanes", "2")
    expect(page.locator(".lane").first).to_contain_text("FullKV")
    expect(page.locator(".lane").nth(1)).to_contain_text("StreamingLLM")
    expect(race).to_have_attribute("data-drawn", re.compile(r"[1-9]\d*"))

    expect(page).to_have_url(re.compile(r"/replay\?run="))  # by itself
    uid = re.findall(r"run=([^&]+)", page.url)[0]
    with TraceReader.open(workshop.runs, uid) as reader:
        losses = reader.loss()
    lost = int(losses.loc[~losses["agrees"].astype(bool), "step"].min())
    expect(player(page)).to_have_attribute("data-step", str(lost))
    settled(page)

    page.get_by_role("link", name="Same prompt, another method or parameter").click()
    expect(page.get_by_text(f"In use: prompt of {uid}.json")).to_be_visible()
    settled(page)
    expect(page.get_by_role("textbox", name="Budget")).to_have_value("10%")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
