"""The Compare page: which runs it opens with, what it says of them, what it refuses to lay side by side."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pandas as pd
import pytest
from pairruns import PARTED, PairRuns, set_info, write_pair
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Visit

from kvlens.app.figures.methodmarks import mark
from kvlens.app.ui.common import sentences
from kvlens.app.ui.compare import groups as comparegroups
from kvlens.app.ui.compare import requested_runs
from kvlens.lens.diagnosis import Wanted, diagnose
from kvlens.lens.reasonkinds import cause
from kvlens.runs import races
from kvlens.runs.races import Lane, RaceInfo
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairRuns:
    return write_pair(tmp_path_factory.mktemp("compare"))


def charts(app: AppTest) -> list[dict[str, Any]]:
    return [json.loads(element.proto.spec) for element in app.get("plotly_chart")]


def at(app: AppTest, *names: str) -> list[str]:
    """Parameters of the address."""
    found = [app.query_params[name] for name in names]
    return [value if isinstance(value, str) else value[0] for value in found]


def maps(app: AppTest) -> list[dict[str, Any]]:
    """The traces of the runs' maps, and of B - A where it is drawn, without what marks unrecorded cells."""
    for spec in charts(app):
        found = [trace for trace in spec["data"] if trace.get("name") and trace["type"] == "heatmap"]
        if found:
            return found
    return []


def table(app: AppTest) -> str:
    """The HTML of the runs side by side."""
    return next(element.proto.body for element in app.get("html") if "<table" in element.proto.body)


def warned(app: AppTest) -> str:
    return "".join(box.value for box in app.warning).replace("\\", "")


def opened(app: AppTest, fold: str) -> AppTest:
    """The page with one of its folds open, whose content is made then."""
    app.session_state[fold] = True
    return app.run()


def tables(app: AppTest) -> list[pd.DataFrame]:
    return [frame.value for frame in app.dataframe]


def test_without_runs_and_with_one_it_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    assert sentences.NO_RUNS in words(visit(tmp_path, "compare"))
    write_synthetic(tmp_path, 2, 4, 2, 6, 8)
    assert sentences.ONE_RUN in words(visit(tmp_path, "compare"))


def test_it_opens_with_the_newest_run_that_has_a_reference(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare")
    assert at(app, "run", "against", "runs") == [pair.run, pair.reference, f"{pair.reference},{pair.run}"]
    assert f"divergence at step {PARTED}" in words(app)
    assert not app.warning


def test_a_link_restores_runs_step_head_and_metric(visit: Visit, pair: PairRuns) -> None:
    link = {
        "runs": f"{pair.reference},{pair.run},{pair.plain}",
        "run": pair.plain,
        "against": pair.run,
        "step": 7,
        "layer": 2,
        "head": 5,
        "metric": "entropy",
    }
    app = visit(pair.folder, "compare", **link)
    assert at(app, *link) == [str(value) for value in link.values()]
    assert app.selectbox(key="compare_metric").value == "entropy"
    assert app.multiselect(key="compare_runs").value == link["runs"].split(",")
    assert [app.selectbox(key=key).value for key in ("compare_a", "compare_b")] == [pair.run, pair.plain]
    assert "divergence at step" not in words(app)


def test_an_older_link_of_two_runs_opens_these(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.plain, step=7)
    assert at(app, "runs", "run", "against", "step") == [f"{pair.run},{pair.plain}", pair.plain, pair.run, "7"]
    assert "cmp" not in app.query_params
    assert not app.warning


def test_a_partner_is_found_for_a_run_alone(visit: Visit, pair: PairRuns) -> None:
    assert at(visit(pair.folder, "compare", run=pair.reference), "run", "against") == [pair.reference, pair.run]
    assert at(visit(pair.folder, "compare", cmp=pair.reference), "run", "against") == [pair.reference, pair.run]


def test_answers_and_verdicts_stand_side_by_side(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", runs=f"{pair.run},{pair.reference},{pair.plain}")
    shown = table(app)
    assert shown.index(pair.reference) < shown.index(pair.run) < shown.index(pair.plain), "full KV stands first"
    assert shown.count("<tr>") == 1 + 3
    assert f"step {PARTED}" in shown
    assert re.search(r"KL \d[.\d]* nats", shown)
    assert "full KV itself" in shown
    assert re.search(
        r"span \d+ \(tokens \d+–\d+\) “.*” by L\d KV\d: .* not recorded, "
        r".* \d\.\d\d, .* \d\.\d\d<br>.*Why: ",
        shown,
    )
    lost = {one.uid: cause(one.kind, one.says) for one in diagnose(pair.folder, Wanted()).lost}
    assert pair.run in lost, "or the next line says nothing"
    assert f"Why: {html.escape(lost[pair.run])}<" in shown, "in the words that losses are grouped by"
    assert mark("sekv").color in shown
    replays = [link.proto.query_string for link in app.get("page_link") if link.proto.page == "replay"]
    assert [parse_qs(found)["run"] for found in replays] == [[pair.reference], [pair.run], [pair.plain]]


def test_what_full_kv_answered_stands_below_an_answer_that_is_not_right(visit: Visit, tmp_path: Path) -> None:
    known = {"answer": "58214", "output_text": "9999", "prompt_tokens": 200}
    both, lost, unknown, right = (
        write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, **{**known, **said})  # type: ignore[arg-type]
        for said in (
            {"reference_output": "1951<b>"},
            {"reference_output": "58214"},
            {},
            {"reference_output": "1951", "output_text": "58214"},
        )
    )
    app = visit(tmp_path, "compare", runs=",".join((both, lost, unknown, right)))
    rows = {uid: row for row in table(app).split("<tr>") for uid in (both, lost, unknown, right) if uid in row}
    assert "wrong answer, full KV&#x27;s too" in rows[both]
    assert "full KV answers: 1951&lt;b&gt;<" in rows[both]
    assert "full KV answers: 58214<" in rows[lost]
    assert ["full KV answers" in rows[uid] for uid in (unknown, right)] == [False, False]
    focus = visit(tmp_path, "compare", runs=f"{both},{lost}")
    assert at(focus, "run") == [lost], "what was lost is looked at first"


def test_settings_that_differ_are_one_table_of_all_runs(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", runs=f"{pair.run},{pair.reference},{pair.plain}")
    names = ["FullKV", "SeKV …sekv", "SeKV …plain"]
    found = next(frame for frame in tables(app) if "setting" in frame and len(frame.columns) == 4)
    assert list(found.columns) == ["setting", *names]
    assert found.set_index("setting").loc["method"].tolist() == ["full", "sekv", "sekv"]
    assert "model" not in set(found["setting"])
    sums = next(frame for frame in tables(opened(app, "compare_sums")) if "quantity" in frame)
    assert list(sums.columns) == ["quantity", *names, "B beside A"]


def test_maps_share_a_range_and_the_difference_stands_around_zero(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", metric="coverage", step=3)
    assert not maps(app), "of two runs the maps at the step stand above"
    a, b, difference = maps(opened(app, "compare_over_steps_two"))
    assert (a["zmin"], a["zmax"]) == (b["zmin"], b["zmax"])
    assert difference["zmid"] == 0
    assert difference["zmin"] == -difference["zmax"]
    assert "not recorded" in a["hovertext"][2][0]
    assert f"steps 0–{PARTED}, same context" in json.dumps(charts(app)[0]["layout"]["title"], ensure_ascii=False)
    app.segmented_control(key="compare_over").set_value("all").run()
    assert "steps 0–29 of all" in json.dumps(charts(app)[0]["layout"]["title"], ensure_ascii=False)


def test_five_runs_have_a_map_each_as_far_as_their_prompt_and_shape_go(visit: Visit, pair: PairRuns) -> None:
    every = (pair.run, pair.reference, pair.plain, pair.other, pair.recut)
    app = visit(pair.folder, "compare", runs=",".join(every), run=pair.run, metric="coverage")
    assert [trace["name"] for trace in maps(app)] == ["FullKV", "SeKV …sekv", "SeKV …plain", "B − A"]
    said = words(app).replace("\\", "")
    assert "with those of SeKV …sekv." in said
    assert "SeKV …recut read the" in said
    assert table(app).count("<tr>") == 1 + 5
    curves = charts(opened(app, "compare_curves"))
    drawn = next(spec for spec in curves if "decode step" in json.dumps(spec["layout"]))
    assert len({trace["legendgroup"] for trace in drawn["data"]}) == 3
    app.selectbox(key="compare_b").set_value(pair.other).run()
    assert "different prompts" in warned(app)
    assert not maps(app)
    app.selectbox(key="compare_b").set_value(pair.plain).run()
    app.selectbox(key="compare_a").set_value(pair.other).run()
    assert [trace["name"] for trace in maps(app)] == ["FullKV", "SeKV …sekv", "SeKV …plain"], "no difference to A"


def test_a_metric_of_one_run_alone_is_shown_beside_grey_cells(visit: Visit, tmp_path: Path) -> None:
    a = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000001-a")
    b = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000002-b", lens=False)
    app = visit(tmp_path, "compare", run=a, cmp=b, metric="regret")
    assert [name for name in app.selectbox(key="compare_metric").options if name.endswith("in A only")] != []
    _, second, difference = maps(opened(app, "compare_over_steps_two"))
    assert second["hovertext"][0][0].endswith("not recorded")
    assert difference["hovertext"][0][0].endswith("not recorded")


def test_it_says_why_there_is_no_regret(visit: Visit, tmp_path: Path) -> None:
    a = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000001-a")
    b = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000002-b", lens=False)
    c = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000003-c")
    for other, expected in ((b, 1), (c, 0)):
        app = visit(tmp_path, "compare", run=a, cmp=other)
        said = words(opened(app, "compare_sums")).replace("\\", "")
        assert said.count("SeKV …b: ") == expected


def test_a_forced_repeat_joins_where_runs_part(visit: Visit, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    set_info(runs, runs.plain, parent=runs.run, forced=True)
    app = visit(runs.folder, "compare", run=runs.run)
    links = [parse_qs(link.proto.query_string) for link in app.get("page_link") if link.proto.page == "compare"]
    three = f"{runs.reference},{runs.run},{runs.plain}"
    assert links == [{"run": [runs.plain], "runs": [three], "against": [runs.reference]}]
    app = visit(runs.folder, "compare", **{name: value[0] for name, value in links[0].items()})
    assert not [link for link in app.get("page_link") if link.proto.page == "compare"], "it is there"


@pytest.mark.parametrize(("which", "said"), [("other", "different prompts"), ("recut", "Another tokenizer")])
def test_runs_that_cannot_be_laid_over_each_other_are_totals(
    visit: Visit, pair: PairRuns, which: str, said: str
) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=getattr(pair, which))
    assert said in "".join(box.value for box in app.warning)
    assert any("B beside A" in table for table in tables(opened(app, "compare_sums")))
    assert not [spec for spec in charts(app) if any(trace["type"] == "heatmap" for trace in spec["data"])]
    assert not [box for box in app.selectbox if box.key == "compare_metric"]


def test_bad_values_are_said_in_sentences_and_something_is_shown(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp="nonsense", step=900, layer=77, metric="magic")
    said = warned(app)
    assert "run 'nonsense' is not" in said
    assert "step 900 beyond 29; showing 29" in said
    assert "layer 77 beyond 2; showing 2" in said
    assert "metric 'magic' was recorded" in said
    assert at(app, "run", "against") == [pair.run, pair.reference]
    app = visit(pair.folder, "compare", run="nonsense", cmp=pair.reference)
    assert "run 'nonsense' is not" in warned(app)
    app = visit(pair.folder, "compare", runs="nonsense,../../etc,<b>", run="x")
    assert all(f"'{name}'" in warned(app).replace("\\", "") for name in ("nonsense", "../../etc", "<b>"))
    assert at(app, "run") == [pair.run], "what the page opens with by itself"


def test_too_many_runs_and_one_named_twice(visit: Visit, pair: PairRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.run)
    assert sentences.ONE_RUN_NAMED in warned(app)
    assert at(app, "run", "against") == [pair.run, pair.reference]
    monkeypatch.setattr(requested_runs, "MOST", 2)
    app = visit(pair.folder, "compare", runs=f"{pair.run},{pair.plain},{pair.reference}")
    assert "takes at most 2 runs, not 3; showing the first 2" in warned(app)
    assert at(app, "runs") == [f"{pair.run},{pair.plain}"]


def test_a_run_that_cannot_be_read_takes_no_other_with_it(visit: Visit, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    trace = tmp_path / runs.plain / "trace.duckdb"
    trace.chmod(0o644)
    trace.write_bytes(b"not a database" * 1000)
    app = visit(tmp_path, "compare", runs=f"{runs.reference},{runs.plain},{runs.run}")
    assert len(app.error) == 1
    assert table(app).count("<tr>") == 1 + 2


def test_the_cursor_goes_as_far_as_the_longer_run(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.plain, cmp=pair.run, step=25)
    assert at(app, "step") == ["25"]
    assert not app.warning


def test_swap_and_pickers_move_the_runs(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", runs=f"{pair.reference},{pair.run},{pair.plain}", run=pair.run)
    next(button for button in app.button if button.label == "Swap").click().run()
    assert at(app, "against", "run") == [pair.run, pair.reference]
    app.selectbox(key="compare_b").set_value(pair.plain).run()
    assert at(app, "against", "run") == [pair.run, pair.plain]
    app.selectbox(key="compare_a").set_value(pair.plain).run()
    assert at(app, "against", "run") == [pair.plain, pair.run]


def test_runs_are_added_and_taken_away(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run)
    offered = app.multiselect(key="compare_runs").options
    assert offered[-1].endswith("…other"), "runs of the same prompt come first"
    assert sorted(row.rpartition("…")[2] for row in offered[:-1]) == ["full", "plain", "recut", "sekv"]
    app.multiselect(key="compare_runs").set_value([pair.reference, pair.run, pair.plain]).run()
    assert at(app, "run", "runs") == [pair.run, f"{pair.reference},{pair.run},{pair.plain}"]
    app.multiselect(key="compare_runs").set_value([pair.reference, pair.plain]).run()
    assert at(app, "run", "runs") == [pair.plain, f"{pair.reference},{pair.plain}"]
    app.multiselect(key="compare_runs").set_value([pair.plain]).run()
    assert sentences.TWO_READABLE_RUNS in words(app)
    app.multiselect(key="compare_runs").set_value([pair.plain, pair.run]).run()
    assert table(app).count("<tr>") == 1 + 2


def test_the_comparison_in_hand_takes_a_run_of_another_page(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run)
    app.query_params.clear()
    app.query_params["run"] = pair.plain
    app.switch_page("pages/replay.py").run()
    label = "Add to the comparison of 2 runs"
    (link,) = (link for link in app.get("page_link") if link.proto.label == label)
    found = parse_qs(link.proto.query_string)
    assert found == {"run": [pair.plain], "runs": [f"{pair.reference},{pair.run},{pair.plain}"]}
    app.query_params.clear()
    app.switch_page("pages/compare.py").run()
    assert pair.plain in at(app, "runs")[0], "the run that was looked at meanwhile, and its partner"
    assert pair.reference not in at(app, "runs")[0]


def test_a_race_is_a_comparison_of_its_lanes(visit: Visit, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    lanes = [
        Lane(method="full", uid=runs.reference),
        Lane(method="sekv", uid=runs.run),
        Lane(method="sekv", uid=runs.plain),
    ]
    refused = Lane(method="quest", state="refused", message="The budget is too small.")
    uid, about = "20260103-000000-abcdef", {"model": "synthetic", "budget": "20%", "max_new": 30}
    races.write(tmp_path, RaceInfo(id=uid, created="2026-01-03T00:00:00", lanes=[*lanes, refused], **about))
    app = visit(tmp_path, "compare", race=uid)
    assert at(app, "race", "run", "against") == [uid, runs.run, runs.reference]
    assert "runs" not in app.query_params
    assert re.search(r"Quest .* The budget is too small\.", words(app))
    links = [link.proto.query_string for link in app.get("page_link") if link.proto.label == "Back to the lanes"]
    assert links == [f"race={uid}"]
    app.multiselect(key="compare_runs").set_value([runs.reference, runs.plain]).run()
    assert "race" not in app.query_params, "it is not the race any more"
    (tmp_path / "races" / f"{uid}.json").unlink()
    app = visit(tmp_path, "compare", race=uid)
    assert f" race {uid}" in warned(app)
    assert table(app).count("<tr>") == 1 + 2


def test_all_runs_with_an_answer_are_points(visit: Visit, pair: PairRuns) -> None:
    app = opened(visit(pair.folder, "compare"), "compare_quality")
    points = [spec for spec in charts(app) if "exact match" in json.dumps(spec["layout"])]
    assert len(points) == 2
    assert points[0]["data"][0]["marker"]["symbol"] == [mark("sekv").symbol + "-open"]
    assert points[1]["layout"]["xaxis"]["title"]["text"].startswith("attended tokens")


def test_older_runs_are_read_when_asked_for(visit: Visit, pair: PairRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparegroups, "FIRST", 1)
    app = opened(visit(pair.folder, "compare"), "compare_quality")
    assert sentences.NO_KNOWN_ANSWER in words(app)
    next(button for button in app.button if button.label == "Read the 4 older runs too").click().run()
    assert sentences.NO_KNOWN_ANSWER not in words(app)
    assert " a line per " in words(app)


def test_without_a_known_answer_it_says_so(visit: Visit, tmp_path: Path) -> None:
    for seed in (1, 2):
        write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=seed)
    assert sentences.NO_KNOWN_ANSWER in words(opened(visit(tmp_path, "compare"), "compare_quality")).replace("\\", "")


def test_the_commit_of_the_view_moves_the_address(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.reference)
    app.session_state["kvlens_selection"] = app.session_state["kvlens_selection"].merged({"step": 4, "layer": 1})
    app.run()
    assert at(app, "step", "layer", "run", "against") == ["4", "1", pair.reference, pair.run]


def test_a_prompts_name_is_told_though_another_session_empties_what_is_known(
    pair: PairRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Emptied(dict[tuple[str, int], str | None]):
        def __setitem__(self, key: tuple[str, int], value: str | None) -> None:
            self.clear()

    monkeypatch.setenv("KVLENS_RUNS", str(pair.folder))
    monkeypatch.setattr(requested_runs, "_prompts", lambda folder: Emptied())
    assert len(requested_runs.prompt_of(pair.run) or "") == 64
