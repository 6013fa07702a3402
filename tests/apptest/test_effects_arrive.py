"""Replay opens before a run's effects are stored: when they arrive, what the page selects and holds is what the verdict
names."""

from __future__ import annotations

from pathlib import Path

import pytest
from awaitedrun import Place, named_place, store_effects, write_awaited
from streamlit.testing.v1 import AppTest
from test_lens_on_replay import finished, press
from test_pages import player_header
from uiruns import Visit

from kvlens.app.ui.common import data, lensjobs
from kvlens.app.ui.common.request import TryChoice
from kvlens.lens.pieces import Piece
from kvlens.store.amend import outstanding
from kvlens.store.reader import TraceReader

GROUP = 2
"""query heads of a KV head"""


def selected_place(app: AppTest) -> Place:
    """Layer, KV head and span of the player, which the address repeats."""
    header = player_header(app)
    assert all(app.query_params[name] == str(header[name]) for name in ("layer", "head", "span"))
    return int(str(header["layer"])), int(str(header["head"])) // GROUP, int(str(header["span"]))


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def test_a_place_that_nobody_chose_follows_the_verdict(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TryChoice] = []
    uid = write_awaited(tmp_path)
    monkeypatch.setattr(lensjobs, "whatif_command", lambda uid, hold, runs: asked.append(hold) or finished(uid))
    old = named_place(tmp_path, uid)
    with outstanding(tmp_path / uid):
        app = visit(tmp_path, "replay", run=uid)
        assert selected_place(app) == old
        assert "Hold it resident" not in labels(app)
        assert f"Hold span {old[2]}" in labels(app)
        new = store_effects(tmp_path, uid)
    assert new == named_place(tmp_path, uid) != old
    app.run()
    assert selected_place(app) == new
    press(app, "Hold it resident")
    assert [choice.pieces for choice in asked] == [(Piece(new[2]),)]


def test_a_span_that_the_user_chose_stays_and_the_button_names_it(visit: Visit, tmp_path: Path) -> None:
    uid = write_awaited(tmp_path)
    with outstanding(tmp_path / uid):
        old = named_place(tmp_path, uid)
        chosen = next(span for span in (3, 4, 5, 6) if span != old[2])
        app = visit(tmp_path, "replay", run=uid, step=9, layer=old[0], head=old[1] * GROUP, span=chosen)
        new = store_effects(tmp_path, uid)
    app.run()
    assert selected_place(app) == (old[0], old[1], chosen)
    assert new[2] != chosen
    assert f"Hold span {chosen}" in labels(app)
    assert "Hold it resident" not in labels(app)


def test_what_a_page_found_in_the_old_trace_is_not_kept_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effects are stored while the page is drawn."""
    uid = write_awaited(tmp_path)
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path))
    drawn = data.open_run(uid)
    linked = TraceReader.open(tmp_path, uid)
    new = store_effects(tmp_path, uid)
    data.loss_verdict(linked)
    for reader in (drawn, data.open_run(uid)):
        found = data.loss_verdict(reader)
        selection = data.opening(reader, data.metrics(reader), None)
    assert found is not None
    assert found.missed is not None
    assert (found.missed.layer, found.missed.kv_head, found.missed.span) == new
    assert (selection.layer, selection.span) == (new[0], new[2])


def test_a_link_made_before_the_effects_leads_to_what_the_verdict_names(visit: Visit, tmp_path: Path) -> None:
    """The watch page links to the run as soon as it is stored."""

    def page() -> None:
        import os
        from pathlib import Path

        import streamlit as st

        from kvlens.app.ui.common import data, effectplace, places, session
        from kvlens.app.ui.common.state import parse

        uid = os.environ["KVLENS_TEST_UID"]
        if "link" not in st.session_state:
            st.session_state["link"] = places.in_run(uid)
            return
        place, _ = parse(st.session_state["link"])
        reader = data.open_run(uid)
        moved = effectplace.follow_effects(reader, place)
        Path(os.environ["KVLENS_RUNS"], "span").write_text(f"{place.span} {moved.span} {session.revision()}")

    uid = write_awaited(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_RUNS", str(tmp_path))
        patch.setenv("KVLENS_TEST_UID", uid)
        old = named_place(tmp_path, uid)
        app = AppTest.from_function(page).run()
        new = store_effects(tmp_path, uid)
        app.run()
        assert not app.exception
    assert (tmp_path / "span").read_text() == f"{old[2]} {new[2]} 1"
