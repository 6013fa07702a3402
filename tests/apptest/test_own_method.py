"""The page Own method: nothing starts without a path and a tick, and a tick is for one path."""

from __future__ import annotations

from pathlib import Path

import pytest
from uiruns import ROOT, Runs, Visit

from kvlens.app.ui.common import access, reach
from kvlens.app.ui.ownmethod import view

SOURCE = ROOT / "tests" / "plugin" / "small_norms.py"


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A server of this machine alone, with a token; the commands that are queued, which do not start."""
    queued: list[list[str]] = []

    class Queue:
        def submit(self, argv: list[str], title: str) -> str:
            queued.append(argv)
            return "none"

        def get(self, job_id: str) -> None:
            return None

    monkeypatch.setattr(reach, "answers_others", lambda: False)
    monkeypatch.setattr(access, "token", lambda: "a token")
    monkeypatch.setattr(view, "manager", Queue)
    return queued


def test_a_file_runs_after_a_tick_for_its_path(runs: Runs, visit: Visit, own_server: list[list[str]]) -> None:
    page = visit(runs.folder, "own_method")
    assert page.button[0].disabled
    page.text_input(key="own_file").set_value(str(SOURCE)).run()
    assert page.button[0].disabled
    assert "class SmallNorms" in page.code[0].value
    page.checkbox[0].check().run()
    page.button[0].click().run()
    assert own_server == [view.command(str(SOURCE))]
    page.text_input(key="own_file").set_value(str(SOURCE.with_name("last_glance.py"))).run()
    assert (page.checkbox[0].value, page.button[0].disabled) == (False, True)
    assert len(own_server) == 1


def test_a_path_that_is_no_python_file_is_an_error(runs: Runs, visit: Visit, own_server: list[list[str]]) -> None:
    page = visit(runs.folder, "own_method")
    page.text_input(key="own_file").set_value(str(Path(__file__).parent)).run()
    assert len(page.error) == 1
    assert not page.code


def test_a_server_without_a_token_has_no_form(runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "answers_others", lambda: False)
    monkeypatch.setattr(access, "token", lambda: None)
    page = visit(runs.folder, "own_method")
    assert (len(page.warning), len(page.text_input), len(page.button)) == (1, 0, 0)
