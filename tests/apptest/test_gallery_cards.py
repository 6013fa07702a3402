"""The gallery on Home: cards that open a recorded loss, and the marks that lead through it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lensruns import write_lens_runs
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Visit

from kvlens.app import gallery
from kvlens.app.ui.replay.tour import marks
from kvlens.lens.outcomelabel import outcome_label
from kvlens.lens.severity import outcome, severity
from kvlens.lens.verdict import verdict
from kvlens.methods.naming import run_name
from kvlens.player import payload
from kvlens.player.codec import unpack
from kvlens.player.lens import LEAST_HOLE
from kvlens.store.reader import TraceReader, list_runs

LOSS = gallery.losses()[0]


def opener(app: AppTest, loss: gallery.Loss) -> object:
    return app.button(key=f"open_{loss.method}")


def tour(app: AppTest) -> dict[str, object]:
    """What the marks were told."""
    protos = [element.proto for element in app.get("bidi_component")]
    return json.loads(next(proto.json for proto in protos if proto.component_name == "kvlens_tour"))  # type: ignore[no-any-return]


def test_an_empty_folder_shows_a_card_for_every_loss(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path)
    text = words(app).replace("\\", "")
    for loss in gallery.losses():
        assert opener(app, loss)
        assert loss.question in text
        assert f"Expected **“{loss.expected}”**, got :red[**“{loss.came}”**]" in text
        assert loss.held.sentence(loss.full_kv_bytes) in text
        assert f"{loss.place}. {loss.cause[0].upper()}{loss.cause[1:]}. " in text
        assert loss.place.split(" missed span ")[0].startswith("L")
        assert loss.cause.endswith("chosen") or "candidates" not in loss.why or ";" in loss.why, "as far as the cut"
    assert not app.expander


def test_a_card_names_a_stand_in_exactly_where_its_run_had_one(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path / "empty")
    for loss in gallery.losses():
        gallery.bring(loss, tmp_path / "runs")
        with TraceReader.open(tmp_path / "runs", loss.uid) as reader:
            name = run_name(reader.meta)
        assert opener(app, loss).label.startswith(f"Open {name}'s loss"), name  # type: ignore[attr-defined]


def test_a_click_brings_the_loss_and_opens_it_where_it_was_lost(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path)
    opener(app, LOSS).click().run()  # type: ignore[attr-defined]
    assert not app.exception
    assert set(list_runs(tmp_path)["uid"]) == {LOSS.uid, LOSS.held.uid}
    app = visit(tmp_path, "replay", run=LOSS.uid)
    text = words(app).replace("\\", "")
    assert f"**Lost at step {LOSS.verdict.split()[3].rstrip(':')}**" in text
    assert f"**: {LOSS.why}." in text
    assert f"held: {LOSS.held.answer}" in text


def test_the_cards_stay_where_there_are_runs(visit: Visit, tmp_path: Path) -> None:
    write_lens_runs(tmp_path)
    app = visit(tmp_path)
    assert len(app.dataframe) == 1
    assert not app.expander
    for loss in gallery.losses():
        assert opener(app, loss)


def test_a_file_that_is_missing_is_one_sentence(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = visit(tmp_path)
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    opener(app, LOSS).click().run()  # type: ignore[attr-defined]
    assert LOSS.file in app.error[0].value.replace("\\", "")


def test_the_marks_come_unasked_in_the_gallery_and_are_offered_elsewhere(visit: Visit, tmp_path: Path) -> None:
    gallery.bring(LOSS, tmp_path)
    told = tour(visit(tmp_path, "replay", run=LOSS.uid))
    assert (told["run"], told["unasked"]) == (LOSS.uid, True)
    marks = told["marks"]
    assert isinstance(marks, list)
    assert [mark["title"] for mark in marks] == [
        "Lost here",
        "The missed span",
        "Why it was missed",
        "See it on the map",
        "Find the head",
        "Play it",
        "Hold it",
        "Is it back?",
    ]
    assert LOSS.why in marks[2]["text"]
    assert "hatched red" in marks[1]["text"]  # only its summary was read
    assert [mark["inside"] for mark in marks[3:6]] == ["#map", "#heads", "#play"]
    assert repr(LOSS.held.answer) in marks[-1]["text"]
    assert marks[-1]["within"] == ".st-key-hold_result"
    lens = write_lens_runs(tmp_path)
    told = tour(visit(tmp_path, "replay", run=lens.lost))
    assert told["unasked"] is False
    assert told["marks"][-1]["within"] == ".st-key-hold_resident"  # type: ignore[index]


def test_the_marks_say_red_where_the_map_draws_the_span_as_a_hole(tmp_path: Path) -> None:
    said = {}
    for loss in gallery.losses():
        gallery.bring(loss, tmp_path)
        with TraceReader.open(tmp_path, loss.uid) as reader:
            found = verdict(reader)
            assert found is not None
            missed = found.missed
            assert missed is not None
            told = marks(found, severity(reader, found), None)[1]["text"]
            _, arrays = unpack(payload.run_payload(reader, "id", [], [], found))
            places = [int(span) for span in reader.spans()["span"]]
            first, last = arrays["worst_start"][found.step : found.step + 2]
            drawn = {
                places[arrays["worst_span"][i]]: ("red", "hatched")[arrays["worst_summary"][i]]
                for i in range(first, last)
                if arrays["worst_hole"][i] >= 65534 * LEAST_HOLE and missed.state != "partial"
            }
        said[loss.method] = "hatched" if "hatched red" in told else "red" if told.endswith(" red.") else None
        assert said[loss.method] == drawn.get(missed.span), loss.method
    assert set(said.values()) == {"red", "hatched", None}


def test_a_run_that_lost_nothing_has_no_marks(visit: Visit, tmp_path: Path) -> None:
    lens = write_lens_runs(tmp_path)
    app = visit(tmp_path, "replay", run=lens.kept)
    assert "kvlens_tour" not in {element.proto.component_name for element in app.get("bidi_component")}


def test_the_table_of_runs_says_that_the_answer_is_wrong_and_the_held_one_right(visit: Visit, tmp_path: Path) -> None:
    loss = next(loss for loss in gallery.losses() if loss.held.restored)
    gallery.bring(loss, tmp_path)
    app = visit(tmp_path)
    (row,) = app.dataframe[0].value.to_dict("records")
    with TraceReader.open(tmp_path, loss.uid) as reader:
        came = outcome(reader)
    assert {"wrong", "lost"} <= set(came.kinds)
    assert (row["run"], row["outcome"], row["expected"], row["what it is"]) == (
        loss.uid,
        outcome_label(came.words, came.kinds),
        loss.expected,
        "against full KV; 1 more",
    )
    assert row["left full KV at step"] == int(loss.verdict.split()[3].rstrip(":"))
    table = app.toggle(key="runs_whole").set_value(True).run().dataframe[0].value.set_index("run")
    assert "right answer" in table.loc[loss.held.uid, "outcome"]


def test_the_held_run_says_what_was_left_out_of_it(visit: Visit, tmp_path: Path) -> None:
    gallery.bring(LOSS, tmp_path)
    text = words(visit(tmp_path, "replay", run=LOSS.held.uid))
    assert re.search(r"not recorded for L\d+ .* handed on\.", text)
