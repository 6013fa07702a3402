"""Replay open in a browser while a run's effects are stored: verdict, button and address come to name the same span."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from awaitedrun import named_place, store_effects, write_awaited
from playwright.sync_api import expect
from uiserver import Open, Server

from kvlens.store.amend import outstanding


def test_an_open_replay_follows_the_effects(
    tmp_path: Path, open_page: Open, start_server: Callable[[Path], Server]
) -> None:
    uid = write_awaited(tmp_path)
    old = named_place(tmp_path, uid)
    with outstanding(tmp_path / uid):
        page = open_page(f"{start_server(tmp_path).url}/replay?run={uid}")
        expect(page.get_by_role("button", name=f"Hold span {old[2]}")).to_be_visible()
        expect(page).to_have_url(re.compile(rf"span={old[2]}(&|$)"))
        new = store_effects(tmp_path, uid)
    expect(page.get_by_role("button", name="Hold it resident")).to_be_visible()
    expect(page).to_have_url(re.compile(rf"layer={new[0]}&.*span={new[2]}(&|$)"))
    expect(page.get_by_text(re.compile(rf"by L{new[0]} KV{new[1]}")).first).to_be_visible()
