"""The Compare page: which two runs it opens with, what it says of them, what it refuses to lay side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pairruns import PARTED, PairRuns, set_info, write_pair
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Visit

from kvlens.figures.methodmarks import mark
from kvlens.store.synthetic import write_synthetic
from kvlens.ui.compare import groups as comparegroups


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
    """The traces of A, B and B - A."""
    return next(
        found
        for spec in charts(app)
        if len(
            found := [
                trace
                for trace in spec["data"]
                if trace.get("name") in ("A", "B", "B − A") and trace["type"] == "heatmap"
            ]
        )
        == 3
    )


def tables(app: AppTest) -> list[pd.DataFrame]:
    return [frame.value for frame in app.dataframe]


def test_without_runs_and_with_one_it_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    assert "There are no runs yet." in words(visit(tmp_path, "compare"))
    write_synthetic(tmp_path, 2, 4, 2, 6, 8)
    assert "There is one run, and a comparison takes two." in words(visit(tmp_path, "compare"))


def test_it_opens_with_the_newest_run_that_has_a_reference(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare")
    assert at(app, "run", "cmp") == [pair.run, pair.reference]
    assert f"First divergence at step {PARTED}" in words(app)
    assert not app.warning


def test_a_link_restores_runs_step_head_and_metric(visit: Visit, pair: PairRuns) -> None:
    link = {"run": pair.run, "cmp": pair.plain, "step": 7, "layer": 2, "head": 5, "metric": "entropy"}
    app = visit(pair.folder, "compare", **link)
    assert at(app, *link) == [str(value) for value in link.values()]
    assert app.selectbox(key="compare_metric").value == "entropy"
    assert app.selectbox(key="compare_b").value == pair.plain
    assert "The tokens are the same at every step as far as both go" in words(app)


def test_a_partner_is_found_for_a_run_alone(visit: Visit, pair: PairRuns) -> None:
    assert at(visit(pair.folder, "compare", run=pair.reference), "cmp") == [pair.run]
    assert at(visit(pair.folder, "compare", cmp=pair.reference), "run") == [pair.run]


def test_maps_share_a_range_and_the_difference_stands_around_zero(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", metric="coverage", step=3)
    a, b, difference = maps(app)
    assert (a["zmin"], a["zmax"]) == (b["zmin"], b["zmax"])
    assert difference["zmid"] == 0
    assert difference["zmin"] == -difference["zmax"]
    app.segmented_control(key="compare_over").set_value("step").run()
    _, b, _ = maps(app)
    assert "not recorded" in b["hovertext"][2][0]
    assert "at step 3" in json.dumps(charts(app)[0]["layout"]["title"])


def test_a_metric_of_one_run_alone_is_shown_beside_grey_cells(visit: Visit, tmp_path: Path) -> None:
    a = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000001-a")
    b = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000002-b", lens=False)
    app = visit(tmp_path, "compare", run=a, cmp=b, metric="regret")
    assert "Regret (share), recorded in A only" in app.selectbox(key="compare_metric").options
    _, second, difference = maps(app)
    assert second["hovertext"][0][0].endswith("not recorded")
    assert difference["hovertext"][0][0].endswith("not recorded")


def test_it_says_why_there_is_no_regret(visit: Visit, tmp_path: Path) -> None:
    a = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000001-a")
    b = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000002-b", lens=False)
    c = write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=1, uid="20260101-000003-c")
    for other, sentences in ((b, 1), (c, 0)):
        said = words(visit(tmp_path, "compare", run=a, cmp=other))
        assert said.count("No regret of B: full attention by span was not recorded in this run.") == sentences


def test_a_forced_repeat_is_offered_where_runs_part(visit: Visit, tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    set_info(runs, runs.plain, parent=runs.run, forced=True)
    app = visit(runs.folder, "compare", run=runs.run, cmp=runs.reference)
    links = [link.proto.query_string for link in app.get("page_link")]
    assert f"run={runs.plain}&cmp={runs.reference}" in links


def test_different_contexts_are_said_of_a_step_after_the_divergence(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", metric="coverage", step=PARTED + 1)
    app.segmented_control(key="compare_over").set_value("step").run()
    assert "different contexts, so B − A also holds that" in words(app).replace("\\", "")


@pytest.mark.parametrize(("which", "said"), [("other", "different prompts"), ("recut", "another tokenizer")])
def test_runs_that_cannot_be_laid_over_each_other_are_totals(
    visit: Visit, pair: PairRuns, which: str, said: str
) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=getattr(pair, which))
    assert said in "".join(box.value for box in app.warning)
    assert any("B beside A" in table for table in tables(app))
    assert not [spec for spec in charts(app) if any(trace["type"] == "heatmap" for trace in spec["data"])]
    assert not [box for box in app.selectbox if box.key == "compare_metric"]


def test_bad_values_are_said_in_sentences_and_something_is_shown(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp="nonsense", step=900, layer=77, metric="magic")
    said = "".join(box.value for box in app.warning).replace("\\", "")
    assert "run 'nonsense' (cmp) is not among the runs; comparing with another" in said
    assert "step 900 beyond 29; showing 29" in said
    assert "layer 77 beyond 2; showing 2" in said
    assert "metric 'magic' was recorded in neither run; showing" in said
    assert at(app, "cmp") == [pair.reference]
    app = visit(pair.folder, "compare", run="nonsense", cmp=pair.reference)
    assert "run 'nonsense' is not among the runs" in "".join(box.value for box in app.warning).replace("\\", "")


def test_the_same_run_twice_is_refused(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.run)
    assert "A and B are the same run" in words(app)


def test_the_cursor_goes_as_far_as_the_longer_run(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.plain, cmp=pair.run, step=25)
    assert at(app, "step") == ["25"]
    assert not app.warning


def test_swap_and_pickers_move_the_runs(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.reference)
    next(button for button in app.button if button.label == "Swap").click().run()
    assert at(app, "run", "cmp") == [pair.reference, pair.run]
    app.selectbox(key="compare_b").set_value(pair.plain).run()
    assert at(app, "run", "cmp") == [pair.reference, pair.plain]
    app.selectbox(key="compare_a").set_value(pair.plain).run()
    assert at(app, "run", "cmp") == [pair.plain, pair.reference]


def test_all_runs_with_an_answer_are_points(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare")
    points = [spec for spec in charts(app) if "exact match" in json.dumps(spec["layout"])]
    assert len(points) == 2
    assert points[0]["data"][0]["marker"]["symbol"] == [mark("sekv").symbol + "-open"]
    assert points[1]["layout"]["xaxis"]["title"]["text"] == "attended tokens per step and KV head"


def test_older_runs_are_read_when_asked_for(visit: Visit, pair: PairRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparegroups, "FIRST", 1)
    app = visit(pair.folder, "compare")
    assert "No run has a known answer yet." in words(app)
    next(button for button in app.button if button.label == "Read the 4 older runs too").click().run()
    assert "No run has a known answer yet." not in words(app)
    assert "a line per method and preset" in words(app)


def test_without_a_known_answer_it_says_so(visit: Visit, tmp_path: Path) -> None:
    for seed in (1, 2):
        write_synthetic(tmp_path, 2, 4, 2, 6, 8, seed=seed)
    assert "No run has a known answer yet." in words(visit(tmp_path, "compare")).replace("\\", "")


def test_the_commit_of_the_view_moves_the_address(visit: Visit, pair: PairRuns) -> None:
    app = visit(pair.folder, "compare", run=pair.run, cmp=pair.reference)
    app.session_state["kvlens_selection"] = app.session_state["kvlens_selection"].merged({"step": 4, "layer": 1})
    app.run()
    assert at(app, "step", "layer", "cmp") == ["4", "1", pair.reference]
