"""Every page of a run that another engine wrote: the least that a trace may have, and every table."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pages import words
from traces import write_full, write_minimal
from uiruns import Visit

from kvlens.app.report import report_bytes
from kvlens.player.page import player_html
from kvlens.store.reader import TraceReader
from kvlens.trace.importing import import_checked

PAGES = ("replay", "heads", "spans", "memory", "method", "compare", "home", "")
MADE = {"minimal": write_minimal, "full": write_full}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of runs, and the uids of the two imported ones."""
    root = tmp_path_factory.mktemp("traces")
    return root / "runs", {name: import_checked(make(root / name), root / "runs") for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_it(visit: Visit, imported: tuple[Path, dict[str, str]], page: str, name: str) -> None:
    folder, uids = imported
    app = visit(folder, page, run=uids[name], step=1)
    assert not app.error, [box.value for box in app.error]
    print(words(app)[:3000])


@pytest.mark.parametrize("name", MADE)
def test_its_report_and_its_player_can_be_saved(imported: tuple[Path, dict[str, str]], name: str) -> None:
    folder, uids = imported
    with TraceReader.open(folder, uids[name]) as reader:
        assert uids[name].encode() in report_bytes(reader)
        assert uids[name] in player_html(reader)
