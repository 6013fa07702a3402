"""The page Own method: nothing starts without a path and a tick, and a tick is for one path."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from uiruns import ROOT, Runs, Visit

from kvlens.app.ui.common import access, reach
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.widgets import plain
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
    assert own_server == [view.command(str(SOURCE), sha256(SOURCE.read_bytes()).hexdigest())]
    page.text_input(key="own_file").set_value(str(SOURCE.with_name("last_glance.py"))).run()
    assert (page.checkbox[0].value, page.button[0].disabled) == (False, True)
    assert len(own_server) == 1


def test_a_path_that_is_no_python_file_is_an_error(runs: Runs, visit: Visit, own_server: list[list[str]]) -> None:
    page = visit(runs.folder, "own_method")
    page.text_input(key="own_file").set_value(str(Path(__file__).parent)).run()
    assert len(page.error) == 1
    assert not page.code


@pytest.mark.parametrize("path", ["~nobodyhere/x.py", "/nowhere/x.py", "a\0b.py"])
def test_a_file_that_cannot_be_read_is_an_error_and_runs_not(
    runs: Runs, visit: Visit, own_server: list[list[str]], path: str
) -> None:
    page = visit(runs.folder, "own_method")
    page.text_input(key="own_file").set_value(path).run()
    assert len(page.error) == 1
    assert view.refusal() is None
    assert len(page.error) == 1
    assert "Python" in page.error[0].value
    assert (page.checkbox[0].disabled, page.button[0].disabled) == (True, True)


def test_a_tick_is_for_the_text_that_was_shown(
    runs: Runs, visit: Visit, own_server: list[list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("first = 1\n")
    page = visit(runs.folder, "own_method")
    page.text_input(key="own_file").set_value(str(file)).run()
    page.checkbox[0].check().run()
    file.write_text("second = 2\n")
    page.button[0].click().run()
    assert own_server == []
    assert "second" in page.code[0].value
    assert (page.checkbox[0].value, page.button[0].disabled, len(page.warning)) == (False, True, 1)
    page.checkbox[0].check().run()
    page.button[0].click().run()
    assert own_server == [view.command(str(file), sha256(file.read_bytes()).hexdigest())]


def job_under_way() -> None:
    """The script of a page that shows a check."""
    from kvlens.app.ui.ownmethod import view

    view._checked("one")


def test_a_check_shows_the_file_s_name_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue:
        def get(self, job_id: str) -> Job:
            return Job(job_id, [], "Check of ![a](b)*c*.py", 0.0, state="running", done=2)

    monkeypatch.setattr(view, "manager", Queue)
    app = AppTest.from_function(job_under_way).run()
    (bar,) = app.get("progress")
    assert bar.proto.text == f"{plain('Check of ![a](b)*c*.py')}: 2 cases begun"  # type: ignore[attr-defined]
    assert "![" not in bar.proto.text  # type: ignore[attr-defined]


def test_a_server_without_a_token_has_no_form(runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "answers_others", lambda: False)
    monkeypatch.setattr(access, "token", lambda: None)
    page = visit(runs.folder, "own_method")
    assert (len(page.warning), len(page.text_input), len(page.button)) == (1, 0, 0)
