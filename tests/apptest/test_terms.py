"""Each page explains its terms on hover by the glossary."""

from __future__ import annotations

import pytest
from uiruns import Runs, Visit

from kvlens.app.ui.common.terms import TERMS, explained

PAGES = {"": "Runs", "run": "New run", "study": "Study", "replay": "Replay", "heads": "Heads", "memory": "Memory"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_terms(visit: Visit, runs: Runs, page: str) -> None:
    place = {"run": runs.whole} if page in ("replay", "heads", "memory") else {}
    shown = "".join(element.proto.body for element in visit(runs.folder, page, **place).get("html"))
    assert [term for term in TERMS[PAGES[page]] if explained(term) not in shown] == []
