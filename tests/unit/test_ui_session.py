"""Where the session's selection and the address bar disagree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvlens.app.ui.common import session
from kvlens.app.ui.common.state import Selection


class Query(dict[str, str]):
    """The address bar as one run of the script sees it."""

    def to_dict(self) -> dict[str, str]:
        return dict(self)

    def from_dict(self, wanted: dict[str, str]) -> None:
        self.clear()
        self.update(wanted)


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(session_state={}, query_params=Query(run="r", step="0"))
    monkeypatch.setattr(session, "st", fake)
    session.selection()
    session.write_url()
    return fake


def test_a_commit_that_was_sent_before_the_address_of_the_last_one_arrived_still_counts(
    browser: SimpleNamespace,
) -> None:
    before = browser.query_params.copy()
    session.change({"step": 11}, moved_by_python=False)
    session.write_url()
    browser.query_params = Query(before)  # the second commit left the browser while the address still said step 0
    session.change({"step": 10}, moved_by_python=False)
    revision = session.revision()
    assert session.selection()[0].step == 10
    assert session.revision() == revision, "the player must not be told to move"
    session.write_url()
    assert browser.query_params["step"] == "10"


def test_a_pasted_link_and_the_back_button_win(browser: SimpleNamespace) -> None:
    session.change({"step": 11}, moved_by_python=False)
    session.write_url()
    browser.query_params = Query(run="r", step="3")
    revision = session.revision()
    assert session.selection()[0].step == 3
    assert session.revision() == revision + 1


def test_the_address_follows_before_a_page_is_drawn_and_keeps_what_the_page_added(browser: SimpleNamespace) -> None:
    browser.query_params["whatif"] = "other"
    session.store(Selection("r", 7, span=3))
    session.write_selection()
    assert browser.query_params == {"run": "r", "step": "7", "span": "3", "whatif": "other"}
    revision = session.revision()
    assert session.selection()[0] == Selection("r", 7, span=3)
    assert session.revision() == revision, "its own address is no pasted link"
