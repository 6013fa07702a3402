"""Benchmarks in a real browser: a click on a cell lists its trials, the failing one leads to its Replay, the address
restores the cell."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, click_panel, player, showing

ABOUT = {
    "machine": {"processor": "P", "cores": 2},
    "date": "2026-01-01",
    "torch": "2",
    "trials": 12,
    "planned": 12,
    "request": {"model": "demo"},
}


def trials(uid: str) -> list[dict[str, object]]:
    """Full KV is right everywhere; FreeKV loses the second of three prompts of 1,024 tokens at depth 90 %, which has a
    stored run."""
    done = {
        "coverage": 0.5,
        "attended_tokens": 50.0,
        "prompt_tokens": 500,
        "resident_share": 0.2,
        "h2d_bytes_per_step": 1000.0,
        "d2h_bytes_per_step": 0.0,
        "steps": 5,
        "output": " 1111.",
        "answer": " 2222.",
        "passed": True,
        "preset": None,
        "overrides": {},
    }
    rows: list[dict[str, object]] = []
    for method, budget in (("full", ""), ("freekv", "20%")):
        for length in (512, 1024):
            for depth in (0.1, 0.9):
                for seed in (1, 2, 3):
                    lost = (method, length, depth, seed) == ("freekv", 1024, 0.9, 2)
                    rows.append(
                        done
                        | {
                            "task": "needle",
                            "length": length,
                            "depth": depth,
                            "seed": seed,
                            "index": seed - 1,
                            "method": method,
                            "budget": budget,
                            "rule": "resident bytes" if budget else "none",
                            "exact": 0.0 if lost else 1.0,
                            "score": 0.0 if lost else 1.0,
                            "uid": uid if lost else None,
                        }
                    )
    return rows


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> Iterator[Server]:
    with showing(runs.folder, tmp_path_factory.mktemp("results"), ABOUT, trials(runs.whole)) as started:
        yield started


def test_from_a_lost_cell_to_its_replay_and_back(shown: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{shown.url}/benchmarks")
    click_panel(page, page.get_by_test_id("stPlotlyChart").first, 1, 0.75, 0.75)
    expect(page.get_by_text("FreeKV, budget 20%, 1,024 tokens, depth 90%: 2 of 3 right")).to_be_visible()
    expect(page.get_by_text("The failing trial with seed 2: expected '2222.', came '1111.'.")).to_be_visible()
    expect(page).to_have_url(re.compile(r"method=freekv&budget=20%25&length=1024&depth=0\.9"))
    again = open_page(page.url)
    expect(again.get_by_text("FreeKV, budget 20%, 1,024 tokens, depth 90%: 2 of 3 right")).to_be_visible()
    again.get_by_role("link", name="Open in Replay").click()
    expect(again).to_have_url(re.compile(f"replay.*run={runs.whole}"))
    expect(player(again)).to_have_attribute("data-step", re.compile(r"\d+"))


def test_a_second_click_takes_the_selection_back(shown: Server, open_page: Open) -> None:
    page = open_page(f"{shown.url}/benchmarks?suite=grid&task=needle&method=freekv&budget=20%25&length=512&depth=0.1")
    expect(page.get_by_text("FreeKV, budget 20%, 512 tokens, depth 10%: 3 of 3 right")).to_be_visible()
    click_panel(page, page.get_by_test_id("stPlotlyChart").first, 1, 0.25, 0.25)
    expect(page.get_by_text("3 of 3 right")).to_have_count(0)
    expect(page).not_to_have_url(re.compile("depth="))
