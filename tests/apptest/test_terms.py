"""Each page explains its terms on hover by the glossary."""

from __future__ import annotations

import pytest
from uiruns import Runs, Visit

from kvlens.app.ui.common.terms import TERMS, explained

PAGES = {"": "Runs", "run": "New run", "study": "Study", "benchmarks": "Benchmarks"}
OF_A_RUN = {page: page.capitalize() for page in ("replay", "heads", "spans", "method", "memory", "compare")}


def test_every_page_with_terms_is_looked_at() -> None:
    assert {*PAGES.values(), *OF_A_RUN.values()} == set(TERMS)


@pytest.mark.parametrize("page", [*PAGES, *OF_A_RUN])
def test_a_page_shows_its_terms(visit: Visit, runs: Runs, page: str) -> None:
    place = {"run": runs.whole} if page in OF_A_RUN else {}
    shown = "".join(element.proto.body for element in visit(runs.folder, page, **place).get("html"))
    assert [term for term in TERMS[(PAGES | OF_A_RUN)[page]] if explained(term) not in shown] == []
