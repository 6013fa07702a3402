"""Sweeps: what is run, that nothing done is lost or done twice, and the study files of published tables."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support import raises_code

from kvlens import PACKAGE, tasks
from kvlens.demo.encode import demo_encode
from kvlens.engine import batch
from kvlens.lab.bench import sweepfile, tablefile, tablerequest, tablestudy
from kvlens.lab.bench.quality import QualityRequest, lost
from kvlens.lab.bench.sweep import SweepRequest, sweep
from kvlens.lab.bench.tablefile import quality_request, sweep_request
from kvlens.lab.results.summary import summary
from kvlens.lens.severity import outcome
from kvlens.refusal import Refusal
from kvlens.studies import storage
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt, task_prompt
from kvlens.studies.storage import StudyBusy, Trial
from kvlens.tasks import Encoding
from kvlens.tasks.encoding import encoding
from kvlens.workers.lanes import BadCrew, Crew

RESULTS = PACKAGE / "lab/results"

SMALL: dict[str, Any] = {
    "methods": ("full", "streaming_llm"),
    "tasks": ("needle",),
    "budgets": ("20%",),
    "lengths": (256,),
    "depths": (0.2, 0.8),
    "prompts": 2,
    "traces": False,
}


def run(folder: Path, crew: Crew | None = None, most: int = 1000, **changes: Any) -> tuple[list[Any], list[Any]]:
    """Carry out SMALL with these changes -> (task, depth, index, method, number format) of the trials that were run,
    and all rows."""
    ran: list[Any] = []

    def watch(count: int, total: int, row: dict[str, Any]) -> None:
        ran.append(tuple(row[name] for name in ("task", "depth", "index", "method", "dtype")))

    _, rows = sweep(SweepRequest(**SMALL | changes), folder, watch, crew=crew, cancelled=lambda: len(ran) >= most)
    return ran, list(rows)


def test_all_cells_get_a_prompt_before_any_gets_a_second() -> None:
    request = SweepRequest(**SMALL)
    places = list(request.places())
    assert [(depth, index) for _, _, depth, _, index in places] == [(0.2, 0), (0.8, 0), (0.2, 1), (0.8, 1)]
    seeds = {(depth, index): seed for _, _, depth, seed, index in places}
    assert len(set(seeds.values())) == 4
    assert SweepRequest(**SMALL | {"lengths": (256, 512)}).seed(256, 0.2, 1) == seeds[0.2, 1], (
        "other lengths leave a cell's seeds alone"
    )
    assert [(arm.method, arm.dtype) for arm in request.arms()] == [
        ("full", ""),
        ("full", "bfloat16"),
        ("streaming_llm", ""),
    ]


def test_what_is_done_is_not_done_again_and_a_larger_sweep_adds_to_it(tmp_path: Path) -> None:
    ran, rows = run(tmp_path, depths=(0.5,), prompts=1, most=2)
    assert (len(ran), len(rows)) == (2, 2), "a stop keeps what has ended"
    ran, rows = run(tmp_path, depths=(0.5,), prompts=1)
    assert (len(ran), len(rows)) == (1, 3)
    ran, rows = run(tmp_path, prompts=1, depths=(0.5, 0.8), methods=("full", "streaming_llm", "snapkv"))
    assert len(ran) == 5
    assert [(row["depth"], row["method"], row["dtype"]) for row in rows] == [
        (depth, *arm)
        for depth in (0.5, 0.8)
        for arm in (("full", ""), ("full", "bfloat16"), ("streaming_llm", ""), ("snapkv", ""))
    ]
    ran, rows = run(tmp_path, depths=(0.5,), prompts=1)
    assert (ran, len(rows)) == ([], 3), "a smaller one asks for part of it"
    assert len(storage.ids(tmp_path)) == 1


def test_a_text_at_another_place_is_a_prompt_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = tablerequest.task_prompt

    def same_text(task: str, length: int, depth: float, seed: int, index: int, *others: Any) -> StudyPrompt:
        prompt = draw(task, 256, 0.5, 1, 0, *others)
        return replace(prompt, drawn={**prompt.drawn, "length": length, "depth": depth, "seed": seed, "index": index})

    monkeypatch.setattr(tablerequest, "task_prompt", same_text)
    run(tmp_path, prompts=1, depths=(0.5,), methods=("full",))
    ran, rows = run(tmp_path, prompts=1, depths=(0.5,), lengths=(288,), methods=("full",))
    assert (len(ran), [row["length"] for row in rows]) == (2, [288, 288])


def test_an_output_that_nobody_can_score_is_not_judged(tmp_path: Path) -> None:
    request = QualityRequest(methods=("full",), tasks=("needle",), length=256)
    prompt, arm = task_prompt("needle", 256, 0.5, 1, 0, encoding("demo"), "a"), request.arms()[0]
    figures = dict.fromkeys(tablestudy.RECORDED.values(), 1) | {"score": None}
    row = tablestudy.row_of("demo", prompt, arm, Trial("a", arm.key(), "completed", figures=figures))
    judged = row | {"exact": 1.0, "score": 1.0}
    cell = summary([row, judged])
    assert (row["exact"], cell["n"], cell["unjudged"], cell["exact"], lost([row])) == (None, 1, 1, 1.0, [])
    sweepfile.write(tmp_path / "a.json", {}, [row])
    _, (parsed,) = sweepfile.parse(json.loads((tmp_path / "a.json").read_text()), "a")
    found = {name: parsed[name] for name in ("exact", "score", "outcome", "infeasible", "steps")}
    assert found == {"exact": None, "score": None, "outcome": None, "infeasible": None, "steps": 1}


@pytest.mark.parametrize("method", ["quest", "chess", "sparq"])
@pytest.mark.parametrize(("budget", "rule"), [("20%", "attended tokens"), ("100%", "attended tokens")])
def test_a_row_says_the_parameters_that_its_run_had(method: str, budget: str, rule: str) -> None:
    request = SweepRequest(**SMALL | {"methods": (method,), "budgets": (budget,)})
    (arm,) = request.arms()
    prompt = task_prompt("needle", 256, 0.5, 1, 0, encoding("demo"), "a")
    row = tablestudy.row_of("demo", prompt, arm, Trial("a", arm.key(), "completed", figures={}))
    assert (row["overrides"], row["rule"]) == (request.plan().request(arm).overrides, rule)


def test_the_trials_of_a_table_run_on_one_thread() -> None:
    request = SweepRequest(**SMALL)
    assert {request.plan().request(arm).threads for arm in request.plan().arms()} == {1}


@pytest.mark.slow
def test_workers_come_to_the_rows_of_one(tmp_path: Path) -> None:
    _, alone = run(tmp_path / "a", prompts=1)
    ran, rows = run(tmp_path / "b", Crew(2), prompts=1)
    assert len(ran) == 6
    assert rows == alone


@pytest.mark.parametrize("traces", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_batch_comes_to_the_rows_of_one_prompt_at_a_time(tmp_path: Path, traces: bool) -> None:
    changes: dict[str, Any] = {"prompts": 1, "depths": (0.2, 0.5, 0.8), "traces": traces}
    _, alone = run(tmp_path / "a", **changes)
    ran, rows = run(tmp_path / "b", Crew(batch=3), **changes)
    assert len(ran) == len(rows) == len(alone) == 9
    assert not any("batched" in row for row in alone)
    for row, one in zip(rows, alone, strict=True):
        assert row.pop("batched") == 3
        assert row.pop("uid") == one.pop("uid") or traces
        assert row.keys() == one.keys()
        for name, value in one.items():
            near = pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
            assert row[name] == near, name


def test_a_table_refuses_workers_and_models_that_cannot_share_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_code("batch_with_workers", BadCrew):
        run(tmp_path, Crew(2, batch=2), prompts=1)
    monkeypatch.setattr(batch, "changing_type", lambda config: "dynamic")
    with raises_code("batch_rotary", Refusal):
        run(tmp_path, Crew(batch=2), prompts=1)


def test_a_trial_without_its_trace_or_of_other_code_is_run_again(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"depths": (0.5,), "prompts": 1, "traces": True}
    _, rows = run(tmp_path, **changes)
    shutil.rmtree(tmp_path / rows[2]["uid"])
    assert [row[3] for row in run(tmp_path, **changes)[0]] == ["streaming_llm"]
    (study,) = storage.ids(tmp_path)
    trial = next(trial for trial in storage.read_trials(tmp_path, study) if trial.uid == rows[1]["uid"])
    storage.append(tmp_path, study, replace(trial, origin="0123456789abcdef-0123456789abcdef"))
    assert [row[3:] for row in run(tmp_path, **changes)[0]] == [("full", "bfloat16")]


def test_no_trial_begins_once_the_minutes_are_over(tmp_path: Path) -> None:
    run(tmp_path, depths=(0.5,), prompts=1, most=1)
    ran, rows = run(tmp_path, depths=(0.5,), prompts=1, minutes=1e-9)
    assert (ran, len(rows)) == ([], 1), "rows of earlier calls count although their turn did not come"


def test_two_processes_do_not_share_a_sweep(tmp_path: Path) -> None:
    def second(*told: object) -> None:
        with pytest.raises(StudyBusy):
            sweep(SweepRequest(**SMALL | {"prompts": 1}), tmp_path, ignore)

    sweep(SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,)}), tmp_path, second)


def ignore(count: int, total: int, row: dict[str, Any]) -> None:
    """Nobody watches."""


def test_a_real_sweep_and_its_file(tmp_path: Path) -> None:
    about, rows = sweep(SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,)}), tmp_path, ignore)
    target = tmp_path / "grid.json"
    sweepfile.write(target, about, list(rows))
    read_about, read_rows = sweepfile.parse(json.loads(target.read_text()), "grid.json")
    assert read_about["planned"] == 3
    assert read_about["machine"]["processor"]
    first = read_rows[0]
    assert (first["method"], first["exact"], first["uid"], first["answer"]) == ("full", 1.0, None, rows[0]["answer"])
    assert first["coverage"] == pytest.approx(1.0, abs=1e-4)
    assert [(row["dtype"], row["selection_recall"]) for row in read_rows[:2]] == [("", 1.0), ("bfloat16", 1.0)]
    assert 0 < read_rows[2]["selection_recall"] < 1
    assert tasks.remake(first, Encoding(demo_encode())).answer == first["answer"], (
        "a trial's prompt comes back from its row"
    )


JUDGED = ("outcome", "left_full_kv_at_step", "kl_at_loss_nats", "margin_logits", "at_stop_token")


def test_traces_are_stored_and_opened_from_the_row(tmp_path: Path) -> None:
    from kvlens.store.reader import TraceReader

    request = SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,), "traces": True})
    _, rows = sweep(request, tmp_path / "runs", ignore)
    _, plain = sweep(SweepRequest(**request.model_dump() | {"traces": False}), tmp_path, ignore)
    for row, other in zip(rows, plain, strict=True):
        assert row["origin"] == other["origin"]
        assert row["output"] == other["output"]
        assert row["coverage"] == pytest.approx(other["coverage"], abs=1e-3)
        assert row["selection_recall"] == pytest.approx(other["selection_recall"], rel=1e-5)
        assert row["attended_tokens"] == pytest.approx(other["attended_tokens"], rel=1e-5)
        assert row["resident_share"] == pytest.approx(other["resident_share"])
        assert row["h2d_bytes_per_step"] == other["h2d_bytes_per_step"]
        assert row["read_bytes_per_step"] == pytest.approx(other["read_bytes_per_step"])
        assert row["read_share"] == pytest.approx(other["read_share"])
    with TraceReader.open(tmp_path / "runs", rows[2]["uid"]) as reader:
        assert reader.meta.reference == rows[0]["uid"], "the reference is the sweep's own full-KV trial"
        assert len(reader.loss())
        assert outcome(reader).columns().items() >= {name: rows[2][name] for name in JUDGED}.items()
    sweepfile.write(tmp_path / "grid.json", {}, list(plain))
    _, read = sweepfile.parse(json.loads((tmp_path / "grid.json").read_text()), "grid.json")
    words = [f"{'right' if row['exact'] == 1 else 'wrong'} answer" for row in plain]
    assert [[row[name] for name in JUDGED] for row in read] == [[word, None, None, None, None] for word in words]
    assert [row["outcome"].split(",")[0] for row in rows] == words
    assert sweep(request, tmp_path / "runs", lambda *told: pytest.fail("ran again"))[1] == rows


def test_infeasible_and_refused_trials_are_rows(tmp_path: Path) -> None:
    request = SweepRequest(
        **SMALL | {"methods": ("sekv",), "budgets": ("5%",), "lengths": (256, 40_000), "depths": (0.5,), "prompts": 1}
    )
    _, rows = sweep(request, tmp_path, ignore)
    assert rows[0]["infeasible"] > 0.05
    assert "the model takes" in rows[1]["refused"]
    assert "exact" not in rows[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tasks": ("nonsense",)}, "unknown task"),
        ({"tasks": ("ruler:/nowhere/vt.jsonl",)}, "there is no benchmark file"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
        ({"budgets": ("64MB",)}, "shares of full KV"),
        ({"depths": (1.5,)}, "between 0"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        SweepRequest(**SMALL | change)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1], "does not hold a sweep"),
        ({"about": {}, "columns": ["task"], "trials": []}, "lacks the column 'length'"),
        (
            {"about": {}, "columns": list(sweepfile.COLUMNS), "trials": [["needle"]]},
            r"trial 1 .* does not have its \d+ columns",
        ),
        (
            {
                "about": {},
                "columns": list(sweepfile.COLUMNS),
                "trials": [[None if c == "coverage" else 1 for c in sweepfile.COLUMNS]],
            },
            "trial 1 .* was run and has no number for 'coverage'",
        ),
    ],
)
def test_a_damaged_result_is_a_sentence(content: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sweepfile.parse(content, "grid.json")


def test_every_published_table_has_its_study_file() -> None:
    """The file asks for what the result says was asked, and the one reads as the other."""
    names = set()
    for result in sorted([*RESULTS.glob("quality-*.json"), *RESULTS.glob("grid-*.json")]):
        known: Any = (
            (QualityRequest, quality_request) if result.stem.startswith("quality") else (SweepRequest, sweep_request)
        )
        kind, read = known
        asked = json.loads(result.read_text(encoding="utf-8"))["about"]["request"]
        fields = {name: value for name, value in asked.items() if name in kind.model_fields and name != "minutes"}
        request, file = kind(**fields), tablefile.TABLES / f"{result.stem}.toml"
        assert read(Path(result.stem)) == request, result.stem
        assert file.read_text(encoding="utf-8") == tablefile.table_text(request, result.stem)
        names.add(file.name)
    assert names == {path.name for path in tablefile.TABLES.iterdir()}
    assert len(names) >= 12


def test_a_study_file_draws_the_prompts_of_its_request() -> None:
    request = SweepRequest(**SMALL)
    text = tablefile.table_text(request, "small")
    names = tomllib.loads(text)["prompts"]
    read = read_prompts(names, lambda: encoding("demo")).prompts
    drawn = {tuple(prompt.drawn.values()) for prompt in read}
    assert drawn == set(request.places())


def test_a_study_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    text = tablefile.table_text(SweepRequest(**SMALL), "small")
    for changed in (
        text.replace("@depth=20", "@depth=30", 1),
        text.replace('"in"', '"in", "after"'),
        text + "preset = 'fit'\n",
    ):
        file.write_text(changed)
        with pytest.raises(ValueError, match=r"study\.toml"):
            sweep_request(file)
