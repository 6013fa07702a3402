"""What is tried on the Replay page: the list that clicks put together, the budget, and what was tried before."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from lensruns import SPAN, STEP, SUMMARY, LensRuns, write_lens_runs
from streamlit.testing.v1 import AppTest
from test_lens_on_replay import finished, press, wait_for_jobs
from test_pages import words
from uiruns import Visit, redate

from kvlens.app.ui.common import data, lensdata, lensjobs, sentences
from kvlens.app.ui.common.request import TryChoice
from kvlens.app.ui.replay import draft, lenswhatif
from kvlens.app.ui.replay.draft import Draft, parse
from kvlens.app.ui.replay.trydetails import made_of
from kvlens.lens.pieces import Piece
from kvlens.lens.tries import Try
from kvlens.lens.trylist import tries_in
from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual, Held
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import delete_run
from kvlens.text.units import si_bytes
from tests.synthetic import write_synthetic

AT = {"step": STEP, "layer": 1, "head": 2, "span": SPAN}
HERE = Piece(SPAN)
BITS = "Restore with the fewest bits"


SINCE = " from step 2"


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    return write_lens_runs(tmp_path_factory.mktemp("tries"))


@pytest.fixture
def asked(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> list[TryChoice]:
    """What the page asked for; each job ends with `lens.held`."""
    found: list[TryChoice] = []
    monkeypatch.setattr(
        lensjobs, "whatif_command", lambda uid, choice, runs: found.append(choice) or finished(lens.held)
    )
    return found


def labels(app: AppTest) -> list[str]:
    return [button.label.replace("\\", "") for button in app.button]


def test_clicks_put_a_list_together_that_is_held_together(visit: Visit, lens: LensRuns, asked: list[TryChoice]) -> None:
    app = visit(lens.folder, "replay", run=lens.repeated, **AT)
    app = press(app, "List it to hold")
    assert app.query_params["hold"] == str(SPAN)
    assert f"hold span {SPAN} · all KV heads" in labels(app)
    assert "Unlist it" in labels(app)
    next(box for box in app.selectbox if box.label == "for").set_value("L1 KV1").run()
    app = press(app, "List it to hold")
    assert app.query_params["hold"] == f"{SPAN}_{SPAN}.L1.KV1"
    app = press(app, "Hold the list")
    assert asked == [TryChoice((HERE, Piece(SPAN, None, 1, 1)), STEP)]
    wait_for_jobs()
    app.run()
    assert app.query_params["whatif"] == lens.held
    assert app.query_params["hold"] == f"{SPAN}_{SPAN}.L1.KV1", "the list stays"


def test_the_result_of_a_hold_is_above_the_button_that_made_it(visit: Visit, lens: LensRuns) -> None:
    def places(**link: str) -> tuple[list[int], int]:
        app = visit(lens.folder, "replay", run=lens.repeated, **AT, **link)
        nodes = [node for node in app.main if not hasattr(node, "children")]
        button = next(place for place, node in enumerate(nodes) if node.type == "button")
        results = [k for k, node in enumerate(nodes) if node.type == "markdown" and "Answer restored" in node.value]
        return results, button

    (result,), button = places()
    assert result == button - 1
    assert places(whatif="none")[0] == []


def test_of_a_run_that_lost_nothing_it_is_asked_what_its_answer_hangs_on(
    visit: Visit, lens: LensRuns, asked: list[TryChoice]
) -> None:
    app = visit(lens.folder, "replay", run=lens.kept, layer=1, head=2, span=SPAN)
    assert {"list_to_hold", "list_to_drop"} <= {button.key for button in app.button}
    assert "Drop it" in labels(app)
    assert sentences.SMALLEST_SET not in labels(app), "there is nothing to bring back"
    app = press(app, "List it to drop")
    assert app.query_params["drop"] == str(SPAN)
    assert f"drop span {SPAN} · all KV heads" in labels(app)
    app = press(app, "List it to hold")
    assert (app.query_params["hold"], "drop" in app.query_params) == (str(SPAN), False), "it cannot be both"
    app = press(press(app, "List it to drop"), "Drop the list")
    assert asked == [TryChoice((), 0, drops=(HERE,))]
    wait_for_jobs()
    assert app.run().query_params["drop"] == str(SPAN), "the list stays"
    app = visit(lens.folder, "replay", run=lens.repeated, **AT, hold="7", drop=f"{SPAN}.L0")
    said = next(button for button in app.button if button.label == "Hold and drop the list")
    assert "listed to drop" in said.help
    assert [label for label in labels(app) if "·" in label] == [
        "hold span 7 · all KV heads",
        f"drop span {SPAN} · KV heads of L0",
    ]


def test_no_drop_is_suggested_where_the_answer_is_wrong_or_nothing_is_known(visit: Visit, tmp_path: Path) -> None:
    """A run that was not compared, and one whose answer is wrong as full KV's is; a right answer hangs on something."""
    runs = write_lens_runs(tmp_path)
    known = {"prompt_tokens": 200, "answer": "4172", "loss_step": 12}
    said = {
        name: write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, output_text=text, **known)  # type: ignore[arg-type]
        for name, text in (("wrong", "9999"), ("right", "4172"))
    }
    for uid, suggested in ((runs.plain, False), (said["wrong"], False), (said["right"], True)):
        app = visit(tmp_path, "replay", run=uid, span=SPAN)
        assert ("Drop it" in labels(app)) == suggested
        assert ("Run the list" in labels(app)) != suggested
        assert {"list_to_hold", "list_to_drop"} <= {button.key for button in app.button}


def test_the_outcome_of_a_drop_says_whether_the_answer_hangs_on_it(visit: Visit, tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)
    drop = {"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 1], [1, 0]], "from_step": 0}
    came = SUMMARY | {"restored": None, "dropped_tokens": 8, "held_tokens": 0, "held_bytes": 0, "kl_before": 0.0}
    made = {
        stands: write_synthetic(
            tmp_path, 2, 4, 2, 12, 14, seed=3, parent=runs.kept, drop=[drop], whatif=came | {"stands": stands}
        )
        for stands in (True, False)
    }
    words_of = {True: "stands without it", False: "hangs on it"}
    for stands, uid in made.items():
        app = visit(tmp_path, "replay", run=runs.kept, whatif=uid)
        told = {metric.label: metric.value for metric in app.metric}
        assert (told["The answer"], told["Dropped"]) == (words_of[stands], "8 tokens")
        assert told[f"KL at step {STEP}, nats"] == "0 → < 0.001"
        text = words(app).replace("\\", "")
        assert f"**Tried:** span {SPAN} (tokens 40–47) dropped for L0 KV1, L1 KV0 from step 0 on." in text
        assert "not attended by 2 of 4 KV heads · the tokens stay" in text
    assert {row[2] for row in table(app)} == {f"it {said}" for said in words_of.values()}
    both = {"hold": [drop | {"span": 7, "tok_start": 56, "tok_end": 64}], "drop": [drop]}
    mixed = came | {"stands": True, "held_tokens": 8, "held_bytes": 4096}
    app = visit(
        tmp_path,
        "replay",
        run=write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, parent=runs.lost, **both, whatif=mixed),
    )
    assert "and a drop:** span 7" in words(app)
    told = {metric.label: metric.value for metric in app.metric}
    assert [value for name, value in told.items() if name.startswith("With the hold")] == ["right"]
    assert told["Held"] == si_bytes(4096)
    assert "8 tokens in 2 KV heads, keys and" in words(app).replace("\\", "")
    app = press(visit(tmp_path, "replay", run=runs.kept), "Undo")
    assert app.query_params["drop"] == f"{SPAN}.L0.KV1_{SPAN}.L1.KV0"
    text = words(visit(tmp_path, "replay", run=made[False])).replace("\\", "")
    assert re.search(r"\*\*Repeat .*drop:\*\* span", text)
    lifted = SUMMARY | {"held_tokens": 0, "held_bytes": 0, "lifted_tokens": 8}
    back = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, parent=made[False], hold=[drop], whatif=lifted)
    app = visit(tmp_path, "replay", run=made[False], whatif=back)
    assert {metric.label: metric.value for metric in app.metric}["Drop lifted"] == "0 B"
    assert "8 tokens attended again, 0 B" in words(app)


def test_a_link_brings_the_list_and_one_click_takes_a_piece_off(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, "replay", run=lens.repeated, **AT, hold=f"{SPAN}_t41-42.L0_nonsense", **{"from": 3})
    assert [label for label in labels(app) if "·" in label] == [
        f"hold span {SPAN} · all KV heads",
        "hold tokens 41-42 · KV heads of L0",
    ]
    assert next(box for box in app.number_input if box.label == "from step").value == 3
    app = app.button(key="chip_hold_t41-42.L0").click().run()
    assert app.query_params["hold"] == str(SPAN)
    app = press(app, "Unlist it")
    assert "hold" not in app.query_params
    assert f"Hold span {SPAN}" in labels(app)
    assert app.query_params["from"] == "3"


def test_what_a_link_lists_and_the_run_does_not_have_cannot_be_run(visit: Visit, lens: LensRuns) -> None:
    for listed, said in (
        ({"hold": "99_0", "drop": "5", "from": "99"}, "has no span 99"),
        ({"drop": "t7000-7001"}, "has no token 7001"),
        ({"hold": f"{SPAN}.L9"}, "the model has 2 layers"),
        ({"hold": f"{SPAN}", "drop": f"{SPAN}.L1"}, "would be both held and dropped for layer 1, KV head 0"),
    ):
        app = visit(lens.folder, "replay", run=lens.repeated, **AT, **listed)
        (button,) = (one for one in app.button if one.label.endswith("the list"))
        assert button.disabled
        assert said in words(app).replace("\\", "")
        assert "from" not in app.query_params


def test_the_list_of_a_run_stays_with_it(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, "replay", run=lens.repeated, **AT, hold=f"{SPAN}", whatif="none")
    app.selectbox(key="run_picker_Replay").set_value(lens.lost).run()
    assert app.query_params["run"] == lens.lost
    assert not {"hold", "whatif"} & set(app.query_params)
    assert not [label for label in labels(app) if "·" in label]
    app.query_params.clear()
    for name, value in {"run": lens.repeated, **AT, "hold": f"{SPAN}.L0"}.items():
        app.query_params[name] = str(value)  # as Back does
    app.run()
    assert f"hold span {SPAN} · KV heads of L0" in labels(app)


def test_a_list_has_room_for_so_many_pieces(visit: Visit, lens: LensRuns) -> None:
    many = "_".join(f"t{place}" for place in range(draft.MOST + 5))
    app = visit(lens.folder, "replay", run=lens.repeated, **AT, hold=many)
    assert len([label for label in labels(app) if "·" in label]) == draft.MOST
    assert app.button(key="list_to_hold").disabled
    app = press(app, "Clear")
    assert not app.button(key="list_to_hold").disabled
    assert "hold" not in app.query_params


def test_what_a_link_says_of_it_is_never_trusted() -> None:
    assert parse("r", {"hold": "<b>_5_5_-", "from": "-1", "budget": "nan"}) == Draft("r", (Piece(5),))
    assert parse("r", {"from": "٣", "budget": "101"}) == Draft("r")
    assert parse("r", {"from": "3", "budget": "12.5"}) == Draft("r", (), 3, 12.5)
    assert parse("r", {"hold": "5", "drop": "5_6.L0_x"}) == Draft("r", (Piece(5),), drops=(Piece(6, None, 0),))
    assert Draft("r", (), drops=(Piece(5), Piece(6))).query() == {"drop": "5_6"}
    assert Draft("r", (Piece(5),), 3, 12.5).query() == {"hold": "5", "from": "3", "budget": "12.5"}


# ---- another budget
@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run whose method, parameters and sizes belong together."""
    folder = tmp_path_factory.mktemp("budget")
    config = {"sinks": 4, "page": 16}
    known = {"preset": None, "config": config, "request": {"overrides": {}, "preset": None}, "prompt_tokens": 600}
    return folder, write_synthetic(folder, 2, 4, 2, 12, 14, seed=3, method="streaming_llm", **known)


def test_the_budget_is_dragged_and_run(visit: Visit, plain: tuple[Path, str], asked: list[TryChoice]) -> None:
    folder, uid = plain
    app = visit(folder, "replay", run=uid)
    slider = app.select_slider[0]
    own = slider.value
    assert slider.options[-1] == "100%"
    assert f"{own:g}% (as it was)" in slider.options
    app = slider.set_value(50.0).run()
    assert app.query_params["budget"] == "50"
    app = press(app, "Run it at 50%")
    app = press(visit(folder, "replay", run=uid, budget=50, hold="3"), "Hold the list at 50%")
    step = next(box for box in app.number_input if box.label == "from step").value
    assert asked == [TryChoice((), step, (("budget", "50%"),)), TryChoice((Piece(3),), step, (("budget", "50%"),))]
    wait_for_jobs()
    app = visit(folder, "replay", run=uid, budget=50)
    app = app.select_slider[0].set_value(own).run()
    assert "budget" not in app.query_params
    assert "Hold it resident" in labels(app)


def test_what_a_number_of_tokens_comes_to_is_where_the_slider_begins(
    visit: Visit, tmp_path: Path, asked: list[TryChoice]
) -> None:
    """`keep` is 0 in such a run: nothing below what it attended is called more."""
    known = {"method": "quest", "config": {"keep": 0.0, "tokens": 96}, "budget": "1.0", "budget_bytes": None}
    uid = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, prompt_tokens=600, max_new=12, **known)
    app = visit(tmp_path, "replay", run=uid)
    (slider,) = app.select_slider
    assert slider.value == 16.0
    assert slider.options[2:5] == ["keep 15%", "tokens=96, 16% attended (as it was)", "keep 20%"]
    press(slider.set_value(20.0).run(), "Run it at keep 20%")
    assert [choice.changed for choice in asked] == [(("keep", "0.2"),)]
    wait_for_jobs()


def test_a_budget_in_the_link_that_the_slider_does_not_have_is_ignored(
    visit: Visit, plain: tuple[Path, str], lens: LensRuns, asked: list[TryChoice]
) -> None:
    folder, uid = plain
    own = visit(folder, "replay", run=uid).select_slider[0].value
    for share in (12.3, own):
        app = visit(folder, "replay", run=uid, budget=f"{share:g}")
        assert app.select_slider[0].value == own
        assert "Hold it resident" in labels(app)
    app = visit(lens.folder, "replay", run=lens.repeated, **AT, budget=50)
    press(app, f"Hold span {SPAN}")
    assert asked == [TryChoice((HERE,), STEP)]
    wait_for_jobs()


def test_the_button_says_what_it_repeats(visit: Visit, plain: tuple[Path, str]) -> None:
    folder, uid = plain

    def said(**more: object) -> str:
        app = visit(folder, "replay", run=uid, **more)
        return next(button.help for button in app.button if button.label.startswith(("Hold", "Run it")))

    exact = "with the exact keys and values of these tokens on the device"
    assert exact in said()
    assert " at 50%," in said(budget=50)
    assert exact not in said(budget=50)
    assert f" {exact}, at 50%," in said(budget=50, hold="3")


def test_what_it_would_have_cost_has_the_raised_budget_in_it(visit: Visit, plain: tuple[Path, str]) -> None:
    folder, uid = plain
    with TraceReader.open(folder, uid) as reader:
        meta = reader.meta
    assert meta.full_kv_bytes
    assert meta.budget_bytes
    raised = meta.full_kv_bytes // 2 - meta.budget_bytes
    hold = {"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 1], [1, 0]], "from_step": STEP}
    known = {"changed": {"budget": "50%"}, "budget_bytes": meta.full_kv_bytes // 2, "hold": [hold], "whatif": SUMMARY}
    one = write_synthetic(folder, 2, 4, 2, 12, 14, seed=3, parent=uid, **known)
    for place in (visit(folder, "replay", run=uid, whatif=one), visit(folder, "replay", run=one)):
        cost = next(metric for metric in place.metric if metric.label == "More bytes")
        assert cost.value == si_bytes(12_300 + raised)
        assert f"12.3 kB held · {si_bytes(raised)} more of budget" in words(place).replace("\\", "")
    delete_run(folder, one)


def test_a_try_on_a_run_that_held_something_is_told_without_it(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_lens_runs(tmp_path)
    with TraceReader.open(tmp_path, runs.held) as reader:
        (own,) = reader.meta.hold
    renamed = own.to_row() | {"span": 4, "whole": False}
    both = [renamed, {"span": 7, "tok_start": 56, "tok_end": 64, "heads": [[0, 0]], "from_step": STEP + 1}]
    one = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, parent=runs.held, hold=both, whatif=SUMMARY)
    forced = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, parent=runs.held, hold=[renamed], forced=True)
    stored = list_runs(tmp_path)
    stored.loc[stored["uid"] == one, "forced"] = True
    with monkeypatch.context() as reading:
        reading.setattr(data, "open_run", lambda uid: TraceReader.open(tmp_path, uid))
        assert lensdata.forced_repeat(runs.held, stored) == forced, "it holds what the run held"
        rest = stored[stored["uid"] != forced]
        assert lensdata.forced_repeat(runs.held, rest) is None, "it holds more"
    text = words(visit(tmp_path, "replay", run=forced))
    assert "Repeat with" not in text
    assert "did not finish" not in text
    app = visit(tmp_path, "replay", run=runs.held, **AT)
    text = words(app).replace("\\", "")
    assert re.search(rf"span 7 \(tokens 56–63\) .* L0 KV0 from step {STEP + 1} ", text)
    assert "8 tokens in 1 KV head, keys and" in text
    (found,) = tries_in(tmp_path, runs.held)
    assert (found.uid, [str(piece) for piece in found.pieces], found.from_step) == (one, ["7.L0.KV0"], STEP + 1)
    text = words(visit(tmp_path, "replay", run=one)).replace("\\", "")
    assert "with a hold:** span 7 (tokens 56–63)" in text
    assert "8 tokens in 1 KV head, keys and" in text


def test_a_run_that_does_not_say_what_it_was_has_no_other_budget(visit: Visit, lens: LensRuns) -> None:
    assert not visit(lens.folder, "replay", run=lens.lost).select_slider


# ---- searches
@pytest.mark.parametrize(
    ("button", "choice"),
    [
        ("Find the smallest set of heads", TryChoice((HERE,), STEP, (), "heads")),
        ("Restore with the fewest bytes", TryChoice((), STEP, (), "bytes")),
    ],
)
def test_a_search_is_asked_for(
    visit: Visit, lens: LensRuns, asked: list[TryChoice], button: str, choice: TryChoice
) -> None:
    press(visit(lens.folder, "replay", run=lens.repeated, **AT), button)
    assert asked == [choice]
    wait_for_jobs()


def test_bits_are_searched_of_a_quantised_run_alone(
    visit: Visit, lens: LensRuns, asked: list[TryChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(button.label != BITS for button in visit(lens.folder, "replay", run=lens.repeated, **AT).button)
    monkeypatch.setattr(lenswhatif, "packs_numbers", lambda reader: True)
    press(visit(lens.folder, "replay", run=lens.repeated, **AT), BITS)
    assert asked == [TryChoice((), 0, (), "bits")]
    wait_for_jobs()


def test_a_search_says_what_it_tries(visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"phase": "note", "message": "Holding 4 spans of single KV heads, 8.19 kB."})]
    lines.append(json.dumps({"phase": "search", "done": 3, "total": 40}))
    code = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr(lensjobs, "whatif_command", lambda uid, choice, runs: [sys.executable, "-c", code])
    app = press(visit(lens.folder, "replay", run=lens.repeated, **AT), "Restore with the fewest bytes")
    for _ in range(100):
        if "Holding 4 spans" in words(app):
            break
        app.run()
    assert "Holding 4 spans of single KV heads, 8.19 kB." in words(app)
    assert "fewest bytes" in words(app)
    press(app, "Cancel")
    wait_for_jobs()


# ---- what was tried
@pytest.fixture
def tried(tmp_path: Path) -> tuple[LensRuns, list[str]]:
    """A run with three tries, oldest first: a hold, another budget, a search for the fewest bytes."""
    runs = write_lens_runs(tmp_path)
    shutil.rmtree(tmp_path / runs.held)
    hold = {"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 0], [0, 1], [1, 0], [1, 1]], "from_step": 2}
    search = {
        "triples": [[0, 1, SPAN]],
        "tried": 3,
        "most": 3,
        "ended": False,
        "kl": 0.1,
        "tests": [
            {"size": 1, "held_bytes": 900, "kl": 2.0, "restored": False},
            {"size": 2, "held_bytes": 1800, "kl": 0.05, "restored": True},
            {"size": 1, "held_bytes": 900, "kl": 0.1, "restored": True},
        ],
    }
    given = [
        {"hold": [hold], "whatif": SUMMARY | {"restored": False}},
        {"changed": {"budget": "50%"}, "whatif": SUMMARY | {"held_bytes": 0, "held_tokens": 0, "answer_after": "no"}},
        {"hold": [hold | {"heads": [[0, 1]]}], "whatif": SUMMARY | {"search": search}},
    ]
    uids = []
    for number, said in enumerate(given):
        uid = f"20260302-00000{number}-try{number}"
        uids.append(write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, uid=uid, parent=runs.repeated, **said))
        redate(tmp_path / uid / "run.json", f"2026-03-02T00:00:0{number}+00:00")
    return runs, uids


def table(app: AppTest) -> list[tuple[str, str, str]]:
    frame = next(frame.value for frame in app.dataframe if "tried" in frame.value)
    return [(row[""], row["tried"], row["restored, or stands"]) for row in frame.to_dict("records")]


def test_all_tries_are_a_list_and_undo_goes_back_through_it(visit: Visit, tried: tuple[LensRuns, list[str]]) -> None:
    runs, (held, budget, searched) = tried
    app = visit(runs.folder, "replay", run=runs.repeated, **AT)
    assert table(app) == [
        ("●", f"span {SPAN} held for L0 KV1{SINCE} (found by a search)", "yes"),
        ("", "budget 50%", "yes"),
        ("", f"span {SPAN} held for all 4 KV heads{SINCE}", "no"),
    ]
    assert "Fewest bytes found: span 5 for L0 KV1 (3 sets tried, as" in words(app)
    assert [box.label for box in app.expander if "sets tried" in box.label] == ["3 sets tried: bytes against restored"]

    app = press(app, "Undo")
    assert app.query_params["whatif"] == budget
    assert "hold" not in app.query_params
    assert "Answer at budget 50%: no" in "\n".join(text.value for text in app.text)
    assert [row[0] for row in table(app)] == ["", "●", ""]
    app = press(app, "Undo")
    assert app.query_params["whatif"] == held
    assert (app.query_params["hold"], app.query_params["from"]) == (str(SPAN), "2")
    assert "Hold the list" in labels(app)
    app = press(app, "Undo")
    assert app.query_params["whatif"] == "none"
    assert not {"hold", "from"} & set(app.query_params)
    assert not app.metric
    assert [row[0] for row in table(app)] == ["", "", ""]
    assert visit(runs.folder, "replay", run=runs.repeated, **AT, whatif=searched).metric


def test_a_try_is_deleted_after_a_second_click(visit: Visit, tried: tuple[LensRuns, list[str]]) -> None:
    runs, (held, budget, searched) = tried
    app = visit(runs.folder, "replay", run=runs.repeated, **AT, whatif=budget)
    assert f"Delete run {budget}," in words(app)
    app = press(app, "Delete it")
    assert not (runs.folder / budget).exists()
    assert app.query_params["whatif"] == searched
    assert [row[1] for row in table(app)][1] == f"span {SPAN} held for all 4 KV heads{SINCE}"
    press(press(app, "Delete it"), "Delete it")
    assert not (runs.folder / held).exists()
    assert (runs.folder / runs.repeated).exists()


def test_another_budgets_run_says_what_it_is(visit: Visit, tried: tuple[LensRuns, list[str]]) -> None:
    runs, (_, budget, _) = tried
    text = words(visit(runs.folder, "replay", run=budget))
    assert "with another setting:** budget 50%." in text
    listed = visit(runs.folder).toggle(key="runs_whole").set_value(True).run().dataframe[0].value.set_index("run")
    assert listed.loc[budget, "what it is"] == f"what-if of …{runs.repeated[-6:]}"


@pytest.mark.parametrize(("method", "copied"), [("quest", True), ("snapkv", False)])
def test_what_a_hold_costs_says_where_it_is_a_copy_of_what_the_method_keeps(method: str, copied: bool) -> None:
    """Of a method that keeps every token on the device, being read is no room."""
    held = Held(span=3, tok_start=32, tok_end=48, heads=((0, 1),), from_step=0)
    summary = Counterfactual(expected_from="task", held_bytes=8192, held_tokens=16)
    one = Try("20260101-000000-abcdef", (held,), {}, summary, 819_200, None, 2, 2)
    sizes = {"layers": 2, "q_heads": 4, "kv_heads": 2, "full_kv_bytes": 819_200}
    said = made_of(one, RunMeta.model_validate({"method": method, **sizes}))
    assert said.startswith("16 tokens in 1 KV head, ")
    assert (" · a copy: " in said) == copied
    assert "1.00% of full KV" in said
