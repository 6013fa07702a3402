"""Every page: whole, with nothing to show, with bad parameters, with a run that cannot be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from uiruns import Runs, Visit

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.frame import run_label
from kvlens.app.ui.replay.details import LONGEST, in_a_line
from kvlens.models.find import short_model
from kvlens.player.codec import unpack
from tests.synthetic import write_synthetic


def words(app: AppTest) -> str:
    """All plain text, captions, boxes and headings of a page, without the backslashes that keep Markdown literal."""
    kinds = (app.text, app.caption, app.markdown, app.warning, app.error, app.info, app.success, app.subheader)
    return "\n".join(str(element.value) for elements in kinds for element in elements).replace("\\", "")


def player_header(app: AppTest) -> dict[str, object]:
    """What Python tells the player: the header of the selected head's slice."""
    found = [e.proto for e in app.main if e.type == "bidi_component"] or _components(app)
    return next(unpack(proto.bytes)[0] for proto in reversed(found) if proto.component_name == "kvlens_player")


def _components(app: AppTest) -> list[object]:
    return [element.proto for element in app.get("bidi_component")]


def test_home_without_runs_says_what_kvlens_does_and_offers_a_first_run(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path)
    assert app.title[0].value == "kvlens"
    assert "answer back" in words(app)
    assert [button.label for button in app.button if "loss" not in button.label] == [sentences.RUN_SAMPLE]


@pytest.mark.parametrize("page", ["replay", "heads"])
def test_a_page_without_runs_says_what_to_do(visit: Visit, tmp_path: Path, page: str) -> None:
    assert sentences.NO_RUNS in words(visit(tmp_path, page))


def test_what_a_forced_run_was_fed_is_not_called_its_output() -> None:
    def page() -> None:
        import pandas as pd

        from kvlens.app.ui.home.ticked_runs import run_details

        rows = [("20260101-000000-own", False), ("20260101-000001-fed", True)]
        table = pd.DataFrame(
            [
                {
                    "uid": uid,
                    "error": None,
                    "output_text": " 7304.",
                    "reference": None,
                    "parent": None,
                    "forced": forced,
                }
                for uid, forced in rows
            ]
        )
        for uid, _ in rows:
            run_details(table, uid)

    assert [caption.value for caption in AppTest.from_function(page).run().caption] == [
        "Output",
        "Fed, full KV's tokens",
    ]


def test_home_lists_all_runs_newest_first_with_their_status(visit: Visit, runs: Runs) -> None:
    table = visit(runs.folder).dataframe[0].value
    assert list(table["run"]) == [runs.whole, runs.broken, runs.cancelled, runs.summary, runs.long]
    assert set(table["status"]) == {"completed", "cancelled"}


def test_replay_shows_the_facts_and_the_expected_answer(visit: Visit, runs: Runs) -> None:
    text = words(visit(runs.folder, "replay", run=runs.whole))
    assert text.count("synthetic · ") == 1  # the condition
    assert "n = 1" in text
    assert "self-checks passed 3/3" in text
    assert "Expected answer: 4172" in text


def test_an_answer_above_the_player_is_one_line_however_long() -> None:
    assert in_a_line(" one\r\ntwo\n\nthree\n") == "one⏎two⏎⏎three"
    many = " ".join(f"word{number}" for number in range(200))
    short = in_a_line(many)
    assert short.startswith("word0 word1 ")
    assert short.endswith(" word199")
    assert " … " in short
    assert len(short) <= LONGEST + 3


def test_what_a_run_that_is_not_whole_is() -> None:
    def page() -> None:
        from kvlens.app.ui.common.widgets import status_banner

        for status, steps in (("completed", 9), ("failed", 8), ("cancelled", 0)):
            status_banner(status, steps, None)

    said = [warning.value.replace("\\", "") for warning in AppTest.from_function(page).run().warning]
    assert [sentence.partition("; ")[2].split()[0] for sentence in said] == ["recorded", "no"]
    assert ["failed" in said[0], "cancelled" in said[1]] == [True, True]
    assert said[0].endswith(" 7")


def test_replay_says_that_tokens_were_drawn(visit: Visit, tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 1, 8, seed=4, prompt_tokens=60, temperature=0.9, top_p=0.95)
    app = visit(tmp_path, "replay", run=uid)
    assert "· 1 step · none · temperature 0.9, top-p 0.95, seed 4 ·" in words(app)
    assert "· 1 step ·" in app.selectbox[0].options[0]


def test_a_link_restores_the_selection(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.whole, step=7, layer=2, head=5, span=3, metric="entropy")
    header = player_header(app)
    assert {name: header[name] for name in ("step", "layer", "head", "span", "metric")} == {
        "step": 7,
        "layer": 2,
        "head": 5,
        "span": 3,
        "metric": "entropy",
    }
    assert "What L2 Q5 (KV1) attended at step 7" in words(app)
    assert not app.warning


def test_bad_parameters_are_clamped_with_one_notice(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.whole, step=900, layer="x<b>", head=99, span=5000, metric="nonsense")
    assert len(app.warning) == 1
    notice = app.warning[0].value.replace("\\", "")
    parts = ("step 900 beyond 59; showing 59", "head 99 beyond 7", "not a whole number", "span 5000 is not in this run")
    for part in (*parts, "was not recorded"):
        assert part in notice
    assert player_header(app)["step"] == 59


@pytest.mark.parametrize("page", ["replay", "heads"])
@pytest.mark.parametrize("uid", ["20990101-000000-absent", "../../etc/passwd", "<script>"])
def test_a_run_that_is_not_there_is_one_sentence(visit: Visit, runs: Runs, page: str, uid: str) -> None:
    app = visit(runs.folder, page, run=uid)
    assert len(app.error) == 1


@pytest.mark.parametrize("page", ["replay", "heads"])
def test_a_damaged_run_is_one_sentence(visit: Visit, runs: Runs, page: str) -> None:
    app = visit(runs.folder, page, run=runs.broken)
    assert len(app.error) == 1
    assert "damaged" in words(app)


def test_a_cancelled_run_says_how_far_it_got_and_still_replays(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.cancelled, step=0)
    assert "run is cancelled; recorded to step 9" in words(app)
    assert player_header(app)["step"] == 0


def test_a_moved_selection_moves_the_tables_and_the_url(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.whole)
    app.session_state["kvlens_selection"] = app.session_state["kvlens_selection"].merged(
        {"step": 12, "layer": 1, "head": 3}
    )
    app.run()
    assert "What L1 Q3 (KV0) attended at step 12" in words(app)
    assert app.query_params["step"] == "12"


def test_masses_of_a_head_add_up_to_one(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.whole, step=4, layer=1, head=2)
    caption = next(element.value for element in app.caption if element.value.startswith("Spans that are not listed"))
    tail, listed = map(float, re.findall(r"\d\.\d{4}", caption))
    assert tail + listed == pytest.approx(1.0, abs=1e-4)
    table = next(frame.value for frame in app.dataframe if "mass" in frame.value)
    assert table["mass"].sum() == pytest.approx(listed, abs=0.02)


def test_a_run_without_figures_per_step_says_so(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.summary)
    assert "was not recorded" in words(app)
    assert sentences.NO_FIGURES_PER_STEP in words(visit(runs.folder, "heads", run=runs.summary))


def test_heads_shows_the_selected_head_and_restores_range_and_aggregate(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "heads", run=runs.whole, layer=2, head=6, metric="entropy", agg="max", steps="10-19")
    assert "Selected: L2 Q6 (KV1), max over steps 10–19" in words(app)
    assert app.query_params["steps"] == "10-19"
    assert "n_steps" in app.dataframe[0].value
    assert set(app.dataframe[0].value["n_steps"]) == {10}


def test_the_selection_is_kept_from_page_to_page(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "replay", run=runs.whole, step=5, layer=1, head=4, metric="entropy")
    app.query_params.clear()
    app.switch_page("pages/heads.py").run()
    assert "Selected: L1 Q4 (KV1)" in words(app)


@pytest.mark.parametrize("page", ["compare", "heads", "memory", "spans", "replay"])
def test_a_page_drawn_again_sets_no_choice_in_the_browser(visit: Visit, runs: Runs, page: str) -> None:
    """What a page sets replaces what a person has chosen meanwhile: it is set when it differs, not each time."""
    app = visit(runs.folder, page, run=runs.whole)
    app.run()
    drawn = [*app.selectbox, *app.number_input, *app.multiselect]
    assert drawn
    assert [box.label for box in drawn if box.proto.set_value and not box.disabled] == []


@pytest.mark.parametrize(
    ("name", "short"),
    [("smollm2", "smollm2"), ("models/big/weights.gguf", "weights.gguf"), ("org/model", "model"), ("here/", "here")],
)
def test_a_model_is_shown_without_its_folders(name: str, short: str) -> None:
    row = {"created": "2026-01-01T00:00:00", "method": "m", "model": name, "status": "completed", "uid": "u"}
    assert short_model(name) == short
    assert f"· model {short} ·" in run_label(row)
