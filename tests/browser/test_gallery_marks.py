"""From an empty folder to a lost answer: one click on a card, and marks that lead through it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect
from uiserver import Open, Server, player, settled

from kvlens.app import gallery

LOSS = next(loss for loss in gallery.losses() if loss.held.restored)


def test_a_card_opens_a_loss_and_marks_lead_through_it(
    tmp_path: Path, open_page: Open, start_server: Callable[..., Server]
) -> None:
    page = open_page(start_server(tmp_path / "empty").url)
    page.evaluate("window.localStorage.removeItem('kvlens-marks-left')")
    page.locator(f".st-key-open_{LOSS.method} button").click()
    expect(page).to_have_url(re.compile(rf"/replay\?run={LOSS.uid}"))
    step = LOSS.verdict.split()[3].rstrip(":")
    expect(player(page)).to_have_attribute("data-step", step)

    box, ring, on = page.locator("#box"), page.locator("#ring"), page.locator("#on")
    for number, (title, inside) in enumerate(
        (
            ("Lost here", page.get_by_text(f"Lost at step {step}")),
            ("The missed span", page.get_by_text("Missed most", exact=True)),
            ("Why it was missed", page.get_by_text("Why it was missed", exact=True).first),
            ("See it on the map", page.locator("#map")),
            ("Find the head", page.locator("#heads")),
            ("Play it", page.locator("#play")),
            ("Hold it", page.get_by_role("button", name="Hold it resident")),
            ("Is it back?", page.locator(".st-key-hold_result").filter(has_text=LOSS.held.answer)),
        ),
        1,
    ):
        expect(box).to_have_attribute("data-mark", str(number))
        expect(page.locator("#title")).to_have_text(title)
        page.wait_for_timeout(400)  # the ring follows
        around, about = ring.bounding_box(), inside.bounding_box()
        assert around is not None
        assert about is not None
        assert around["x"] <= about["x"]
        assert around["y"] <= about["y"]
        assert about["y"] + about["height"] <= around["y"] + around["height"] + 1
        on.click()
    expect(box).to_be_hidden()

    page.reload()
    expect(player(page)).to_have_attribute("data-step", step)
    settled(page)
    expect(box).to_be_hidden()  # left once: not again by themselves
    page.get_by_role("button", name="Show me around").click()
    expect(box).to_have_attribute("data-mark", "1")
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    expect(player(page)).to_have_attribute("data-step", step)
    page.get_by_role("button", name="Show me around").click()
    page.get_by_role("button", name="Leave").click()
    expect(box).to_be_hidden()
