"""The Benchmarks page on results that exist, that do not, and that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import ButtonGroup
from uiruns import Runs, Visit

from kvlens.app.figures.methodmarks import FAMILY_COLORS
from kvlens.app.figures.quality import table
from kvlens.app.figures.qualitycost import cost_rows, quality_cost
from kvlens.app.ui.benchmarks import claims
from kvlens.app.ui.benchmarks.matrix import MEANT
from kvlens.app.ui.common import sentences
from kvlens.lab.bench.qualitypage import ORDER
from kvlens.models.catalogue import label

MACHINE = {"processor": "P", "cores": 2}
ABOUT = {
    "machine": MACHINE,
    "date": "2026-01-01",
    "torch": "2",
    "trials": 4,
    "planned": 6,
    "request": {"model": "demo", "tasks": ["needle"], "length": 256},
}
LINE = {
    "method": "full",
    "budget": "",
    "task": "needle",
    "rule": "none",
    "n": 4,
    "infeasible": 0,
    "smallest_feasible": None,
    "exact": 1.0,
    "low": 0.51,
    "high": 1.0,
    "score": 1.0,
    "coverage": 1.0,
    "attended_tokens": 256.0,
    "attended_share": 1.0,
    "resident_share": 1.03,
    "h2d_bytes_per_step": 0.0,
    "d2h_bytes_per_step": 0.0,
}
REFUSED = {
    "method": "sekv",
    "budget": "5%",
    "task": "needle",
    "rule": "resident bytes",
    "n": 0,
    "infeasible": 4,
    "smallest_feasible": 0.1,
}
RULES = {"quest": "attended tokens", "snapkv": "resident bytes"}
CLAIM = {
    "method": "freekv",
    "source": "FreeKV Table 9",
    "says": "s",
    "measured": "m",
    "holds": False,
    "reason": "r",
    "figures": {},
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RESULTS", str(tmp_path))
    return tmp_path


def test_the_first_picture_has_a_line_a_method_and_its_condition_above(visit: Visit, runs: Runs, results: Path) -> None:
    chain = LINE | {"task": "chain", "exact": 0.5, "n": 8}
    snapkv = {"method": "snapkv", "budget": "20%"}
    two_tasks = [LINE, chain, LINE | snapkv | {"n": 1}, chain | snapkv | {"n": 3, "exact": 1.0}]
    two_tasks.append(LINE | {"method": "snapkv", "budget": "5%"})  # without a prompt of the other task
    (results / "quality.json").write_text(json.dumps({"about": ABOUT, "lines": [*two_tasks, REFUSED]}))
    app = visit(runs.folder, "benchmarks")
    (picture,) = app.get("vega_lite_chart") or app.get("arrow_vega_lite_chart")
    assert picture is not None
    words = next(box.value for box in app.markdown if "256 tokens" in box.value)
    assert "n = 4–12 prompts" in words.replace("\\", "")
    titles = {"full": "FullKV", "snapkv": "SnapKV"}
    rows = cost_rows(table([*two_tasks, REFUSED]), titles)
    assert rows["method"].tolist() == ["FullKV", "SnapKV"]
    assert rows["n"].tolist() == [12, 4]
    assert rows["exact"].tolist() == pytest.approx([8 / 12, 1.0])
    colours = quality_cost(rows)["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(colours["domain"], colours["range"], strict=True)) == {
        "reference": FAMILY_COLORS["reference"],
        "prompt eviction": FAMILY_COLORS["prompt_eviction"],
    }


def test_a_point_names_what_held_it() -> None:
    free = [LINE | {"method": "magicpig", "budget": budget} for budget in ("5%", "20%")]
    held = [LINE | {"method": name, "budget": "20%", "rule": rule} for name, rule in RULES.items()]
    rows = cost_rows(table([*free, *held]), {})
    assert rows[["method", "budget"]].to_numpy().tolist() == [
        ["magicpig", "no limit"],
        ["quest", "20% of attended tokens"],
        ["snapkv", "20%"],
    ]


def test_the_first_picture_has_the_methods_of_all_tables_on_the_same_prompts(
    visit: Visit, runs: Runs, results: Path
) -> None:
    other = LINE | {"method": "snapkv", "budget": "20%", "n": 9}
    longer = ABOUT | {"request": ABOUT["request"] | {"length": 512}}
    again = other | {"n": 20}  # the same prompts, on another version
    tables = {
        "quality": (ABOUT, LINE),
        "quality-newer": (ABOUT, other),
        "quality-512": (longer, other | {"n": 30}),
        "quality-old": (ABOUT | {"torch": "1"}, again),
        "quality-damaged": ({"model": "demo"}, LINE),
    }
    for name, (about, line) in tables.items():
        (results / f"{name}.json").write_text(json.dumps({"about": about, "lines": [line]}))
    app = visit(runs.folder, "benchmarks")
    words = next(box.value for box in app.markdown if "256 tokens" in box.value and "prompts a point" in box.value)
    assert "n = 4–9 prompts" in words.replace("\\", "")


def test_shows_what_was_measured_and_on_what(visit: Visit, runs: Runs, results: Path) -> None:
    (results / "quality.json").write_text(json.dumps({"about": ABOUT, "lines": [LINE, REFUSED]}))
    app = visit(runs.folder, "benchmarks")
    said = " ".join(box.value for box in app.caption)
    assert "4 of 6 trials" in said
    assert "2026\\-01\\-01, P, 2 cores" in said
    assert list(app.dataframe[0].value["method"]) == ["FullKV", "SeKV"]
    assert not [option for option in app.segmented_control(key="bench_axis").options if "bytes read" in option]
    assert not app.error


def test_claims_are_listed_and_of_one_all_is_said(visit: Visit, runs: Runs, results: Path) -> None:
    other = CLAIM | {"source": "FreeKV Table 8", "holds": None, "measured": "n", "reason": ""}
    about = {**ABOUT, "model": "demo", "prompts": 3}
    (results / "claims.json").write_text(
        json.dumps(
            {
                "methods": {
                    "freekv": {"about": about, "claims": [other, CLAIM]},
                    "quest": {
                        "about": about,
                        "claims": [CLAIM | {"method": "quest", "source": "Quest", "holds": True}],
                    },
                }
            }
        )
    )
    app = visit(runs.folder, "benchmarks")
    said = " ".join(box.value for box in app.caption)
    assert "Of 3 claims of 2 papers 1 hold, 1 do not hold, 1 are not decided" in said
    assert list(app.dataframe[0].value["here"]) == ["is not decided", "does not hold", "holds"]
    assert [box.value for box in app.text if box.value.endswith(" n")] != []
    app.button_group(key="claims_here_demo").set_value(["does not hold"]).run()
    assert list(app.dataframe[0].value["where"]) == ["FreeKV Table 9"]
    shown = {box.value for box in app.text}
    assert {"FreeKV Table 9: s", "Why: r"} <= shown
    assert [text for text in shown if text.endswith(" m")] != []
    app.selectbox(key="claims_of_demo").select("Quest").run()
    assert list(app.dataframe[0].value["where"]) == ["Quest"]
    assert not app.error


def test_says_what_to_do_when_nothing_was_measured(visit: Visit, runs: Runs, results: Path) -> None:
    app = visit(runs.folder, "benchmarks")
    parts = ("sweep", "quality", "explain", "claims", "GPU")
    for box, part in zip(app.info, parts, strict=True):
        assert part in box.value
        assert "docs/" in box.value.replace("\\", "")
        assert "kvlens bench" not in box.value


@pytest.mark.parametrize("name", ["quality.json", "explain.json", "claims.json"])
@pytest.mark.parametrize(
    "text", ["not json", "[1]", '{"about": {}, "lines": []}', '{"methods": {"freekv": {"claims": [{}]}}}']
)
def test_a_damaged_result_is_one_sentence(visit: Visit, runs: Runs, results: Path, name: str, text: str) -> None:
    (results / name).write_text(text)
    app = visit(runs.folder, "benchmarks")
    assert len(app.error) == 1
    assert "measure it again" in app.error[0].value


def test_the_results_that_come_with_kvlens_can_be_shown(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "benchmarks")
    assert not app.error


def test_each_model_has_its_results_and_the_toy_comes_last(visit: Visit, runs: Runs, results: Path) -> None:
    def table(model: str, n: int, **more: Any) -> str:
        asked = {"model": model, "tasks": ["needle"], "length": 256} | more
        noise = {**LINE, "dtype": "bfloat16", "selection_recall": 0.5, "read_share": 0.5, "presets": {"fit": n}}
        noise["read_bytes_per_step"] = 1e6
        return json.dumps({"about": {**ABOUT, "trials": n, "request": asked}, "lines": [LINE, noise]})

    (results / "quality-demo.json").write_text(table("demo", 1))
    (results / "quality-other.json").write_text(table("other", 2))
    (results / "quality-other-after.json").write_text(table("other", 3, question="after"))
    (results / "quality-other-two.json").write_text(table("other", 4, tasks=["list", "needle"]))
    app = visit(runs.folder, "benchmarks")
    models, tables = app.segmented_control(key="bench_model"), app.segmented_control(key="bench_table")
    assert [option.replace("\\", "") for option in models.options] == ["other", label("demo")]
    assert [option.replace("\\", "") for option in tables.options] == [
        f"256 tokens, {ORDER['in']}: list, needle",
        f"256 tokens, {ORDER['in']}: needle",
        f"256 tokens, {ORDER['after']}",
    ], "tasks are named where tables differ in nothing else"
    tables.set_value("quality-other.json").run()

    def caption() -> str:
        return next(box.value for box in app.caption if "Wilson" in box.value).replace("\\", "")

    assert "context, tasks needle; 2 of 6" in caption()
    tables.set_value("quality-other-after.json").run()
    assert "placed, tasks needle; 3 of 6 trials" in caption()
    shown = app.dataframe[0].value
    assert list(shown["method"]) == ["FullKV", "FullKV in bfloat16 (noise floor)"]
    assert shown["selection_recall"].isna().tolist() == shown["read_share"].isna().tolist() == [True, False]
    assert not app.segmented_control(key="bench_axis").set_value("read_share").run().exception
    assert list(shown["presets"]) == ["", "fit"]
    models.set_value("demo").run()
    assert "Model demo" in caption()
    assert app.query_params["model"] == "demo"
    app = visit(runs.folder, "benchmarks", model="demo")
    assert "Model demo" in caption()
    app = visit(runs.folder, "benchmarks", model="nobody")
    assert "Model other" in caption()
    assert [box.value for box in app.warning if "nobody" in box.value] != []


def test_every_table_of_a_model_is_in_one_matrix(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "benchmarks", model="smollm2")
    frames = [box.value for box in app.dataframe]
    (shown,) = (frame for frame in frames if "mean rank" in frame.columns)
    assert {"SnapKV", "Quest", "SeKV", "FullKV"} <= set(shown["method"])
    (sekv,) = shown[shown["method"] == "SeKV"].to_dict("records")
    texts = [name for name in shown.columns if name.startswith("free text")]
    assert texts
    assert all(sekv[name] > 0 for name in texts), "its trained rows of both kinds of table stand in one row"
    assert "niah_single, 1,024 tokens, question known, 20%" in shown.columns
    caption = next(box.value for box in app.caption if "Mean rank" in box.value).replace("\\", "")
    assert [name in shown.columns for name in MEANT] == [meant in caption for meant in MEANT.values()]
    assert {"resident", "selection recall"} < set(shown.columns)
    chosen = next(pills for pills in app.get("button_group") if pills.key == "matrix_families_smollm2")
    assert {"reference", "prompt eviction", "quantisation"} <= set(chosen.options)


def test_the_matrix_begins_with_the_usual_budget_and_shows_others_when_asked(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "benchmarks", model="smollm2")

    def columns() -> list[str]:
        (shown,) = (box.value for box in app.dataframe if "mean rank" in box.value.columns)
        return [name for name in shown.columns if name.endswith("%")]

    def pills(key: str) -> ButtonGroup[Any]:
        return next(group for group in app.get("button_group") if group.key == f"matrix_{key}_smollm2")

    assert columns()
    assert all(name.endswith(", 20%") for name in columns())
    pills("budgets").set_value(["40%"]).run()
    assert columns()
    assert all(name.endswith(", 40%") for name in columns())
    pills("tasks").set_value(["niah_single"]).run()
    assert columns()
    assert all(name.startswith("niah_single, ") for name in columns())
    assert not app.exception
    app.segmented_control(key="bench_model").set_value("demo").run()
    assert not app.exception, "the toy's tables have neither this task nor this budget"
    assert columns()
    assert all(name.endswith(", 20%") for name in columns())


def lost_cell() -> None:
    """The script of a page that shows one cell's lost trials."""
    from kvlens.app.figures.qualitymatrix import Cell
    from kvlens.app.ui.benchmarks.matrix import _lost

    request = {"model": "demo", "length": 256, "question": "in"}
    wrong = [{"index": 3, "depth": 0.5, "seed": 8000003, "answer": " 4821", "output": " 77"}]
    line = {"method": "snapkv", "budget": "20%", "task": "needle", "n": 4, "exact": 0.75, "low": 0.3, "high": 0.95}
    _lost(Cell(request, line | {"lost": wrong}, "20%"), "SnapKV", "needle, 20%")


def test_a_lost_trial_of_the_matrix_can_be_run_again(visit: Visit, runs: Runs) -> None:
    app = AppTest.from_function(lost_cell).run()
    assert not app.exception
    said = " ".join(box.value for box in app.text)
    assert "3 of 4 right" in said
    assert "expected '4821', came '77'" in said
    assert [button.label for button in app.button] == [sentences.RUN_TRIAL_AGAIN]


def test_claims_name_every_machine_with_its_dates() -> None:
    """Methods whose claims were measured on several machines, on several days."""

    def part(date: str, processor: str) -> dict[str, Any]:
        return {"about": {"date": date, "machine": {"processor": processor, "cores": 2}, "torch": "2"}, "claims": []}

    days = {"snapkv": part("2026-01-02", "B"), "quest": part("2026-01-03", "A"), "tova": part("2026-01-01", "B")}
    _, measured = claims._claims({"methods": days}, "smollm2")
    assert measured == "2026-01-03: A, 2 cores, torch 2; 2026-01-01, 2026-01-02: B, 2 cores, torch 2"
