"""Sweeps: what is run, that nothing done is lost or done twice, workers in this process, in others, and as actors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvlens import tasks
from kvlens.demo.encode import demo_encode
from kvlens.lab.bench import sweepfile
from kvlens.lab.bench.sweep import SweepRequest, sweep
from kvlens.lab.bench.trials import Trial
from kvlens.lens.severity import outcome
from kvlens.tasks import Encoding
from kvlens.workers.lanes import Lane, WorkerLost

SMALL: dict[str, Any] = {
    "methods": ("full", "streaming_llm"),
    "tasks": ("needle",),
    "budgets": ("20%",),
    "lengths": (256,),
    "depths": (0.2, 0.8),
    "prompts": 2,
    "traces": False,
}


class Paper:
    """A lane that runs nothing; `dies` after so many runs."""

    def __init__(self, ran: list[str], dies: int | None = None) -> None:
        self.ran, self.dies, self.closed = ran, dies, False

    def key(self, trial: Trial) -> str:
        return f"{trial.task}/{trial.length}/{trial.depth}/{trial.index}/{trial.method}/{trial.budget}/{trial.dtype}"

    def run(self, trial: Trial) -> dict[str, Any]:
        if self.dies is not None and len(self.ran) >= self.dies:
            raise WorkerLost("a worker ended")
        self.ran.append(self.key(trial))
        return {"key": self.key(trial), **vars(trial), "rule": "none", "exact": 1.0, "uid": None}

    def close(self) -> None:
        self.closed = True


def on_paper(
    kept: Path, count: int = 1, dies: int | None = None, **changes: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    ran: list[str] = []
    made = [Paper(ran, dies if place == 0 else None) for place in range(count)]
    try:
        _, rows = sweep(
            SweepRequest(**SMALL | changes),
            kept,
            kept.parent,
            lambda *told: None,
            open_lanes=lambda request, place: list[Lane](made),
        )
    finally:
        assert all(lane.closed for lane in made)
    return ran, rows


def test_all_cells_get_a_prompt_before_any_gets_a_second(tmp_path: Path) -> None:
    ran, rows = on_paper(tmp_path / "k.jsonl")
    assert [key.split("/")[2:4] for key in ran[::3]] == [["0.2", "0"], ["0.8", "0"], ["0.2", "1"], ["0.8", "1"]]
    assert len(rows) == 12, "the noise floor is a trial of its own"
    seeds = {(row["depth"], row["index"]): row["seed"] for row in rows}
    assert len(set(seeds.values())) == 4
    assert SweepRequest(**SMALL | {"lengths": (256, 512)}).seed(256, 0.2, 1) == seeds[0.2, 1], (
        "other lengths leave a cell's seeds alone"
    )


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_done_is_not_done_again(tmp_path: Path, count: int) -> None:
    kept = tmp_path / "k.jsonl"
    on_paper(kept, count, prompts=1)
    ran, rows = on_paper(kept, count)
    assert len(ran) == 6
    assert len(rows) == 12
    assert [(row["index"], row["depth"], row["method"], row["dtype"]) for row in rows[:4]] == [
        (0, 0.2, "full", ""),
        (0, 0.2, "full", "bfloat16"),
        (0, 0.2, "streaming_llm", ""),
        (0, 0.8, "full", ""),
    ]
    assert on_paper(kept, count)[0] == []


def test_a_lost_worker_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    kept = tmp_path / "k.jsonl"
    with pytest.raises(WorkerLost, match=r"a worker ended.*what was finished is kept: run the sweep again"):
        on_paper(kept, 2, dies=2, prompts=4)
    done = len(kept.read_text().splitlines())
    assert done >= 2
    ran, rows = on_paper(kept, 2, prompts=4)
    assert len(ran) == 24 - done
    assert len(rows) == 24


def test_a_trial_without_its_trace_is_run_again(tmp_path: Path) -> None:
    kept = tmp_path / "k.jsonl"
    on_paper(kept, prompts=1)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    (tmp_path / "20260101-000000-abc").mkdir()
    (tmp_path / "20260101-000000-abc" / "trace.duckdb").write_bytes(b"")
    kept.write_text(
        "".join(
            json.dumps(line | {"uid": "20260101-000000-abc" if at < 5 else "gone"}) + "\n"
            for at, line in enumerate(lines)
        )
    )
    assert len(on_paper(kept, prompts=1, traces=True)[0]) == 1


def test_time_and_a_stop_end_it_early_with_what_is_done(tmp_path: Path) -> None:
    kept, ran = tmp_path / "k.jsonl", []
    about, rows = sweep(
        SweepRequest(**SMALL),
        kept,
        tmp_path,
        lambda *told: None,
        lambda: len(ran) == 3,
        lambda request, place: [Paper(ran)],
    )
    assert (len(rows), about["trials"], about["planned"]) == (3, 3, 12)
    again: list[str] = []
    about, rows = sweep(
        SweepRequest(**SMALL | {"minutes": 1e-9}),
        kept,
        tmp_path,
        lambda *told: None,
        open_lanes=lambda request, place: [Paper(again)],
    )
    assert again == []
    assert len(rows) == 3, "rows of earlier calls count although their turn did not come"


def test_a_real_sweep_and_its_file(tmp_path: Path) -> None:
    about, rows = sweep(
        SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,)}), tmp_path / "k.jsonl", tmp_path, lambda *told: None
    )
    target = tmp_path / "grid.json"
    sweepfile.write(target, about, rows)
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


JUDGED = ("outcome", "left_full_kv_at_step", "kl_nats", "margin_logits", "at_stop_token")


def test_traces_are_stored_and_opened_from_the_row(tmp_path: Path) -> None:
    from kvlens.store.reader import TraceReader

    request = SweepRequest(**SMALL | {"prompts": 1, "depths": (0.5,), "traces": True})
    kept = tmp_path / "k.jsonl"
    _, rows = sweep(request, kept, tmp_path / "runs", lambda *told: None)
    _, plain = sweep(
        SweepRequest(**request.model_dump() | {"traces": False}), tmp_path / "p.jsonl", tmp_path, lambda *told: None
    )
    for row, other in zip(rows, plain, strict=True):
        assert row["key"] == other["key"]
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
    sweepfile.write(tmp_path / "grid.json", {}, plain)
    _, read = sweepfile.parse(json.loads((tmp_path / "grid.json").read_text()), "grid.json")
    words = [f"{'right' if row['exact'] == 1 else 'wrong'} answer" for row in plain]
    assert [[row[name] for name in JUDGED] for row in read] == [[word, None, None, None, None] for word in words]
    assert [row["outcome"].split(",")[0] for row in rows] == words
    assert sweep(request, kept, tmp_path / "runs", lambda *told: pytest.fail("ran again"))[1] == rows


def test_infeasible_and_refused_trials_are_rows(tmp_path: Path) -> None:
    request = SweepRequest(
        **SMALL | {"methods": ("sekv",), "budgets": ("5%",), "lengths": (256, 40_000), "depths": (0.5,), "prompts": 1}
    )
    _, rows = sweep(request, tmp_path / "k.jsonl", tmp_path, lambda *told: None)
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
        ({"workers": 0}, "greater than or equal"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        SweepRequest(**SMALL | change)


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "k.jsonl"
    kept.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="does not hold trials"):
        sweep(SweepRequest(**SMALL), kept, tmp_path, lambda *told: None)
    assert kept.read_text() == '{"a": 1}\n'


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


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
def test_a_line_separator_in_an_output_does_not_end_a_line(tmp_path: Path, sign: str) -> None:
    kept = tmp_path / "k.jsonl"
    on_paper(kept, prompts=1)
    lines = [json.loads(line) for line in kept.read_text().split("\n")[:-1]]
    kept.write_text("".join(json.dumps(line | {"output": f"a{sign}b"}, ensure_ascii=False) + "\n" for line in lines))
    ran, rows = on_paper(kept, prompts=1)
    assert ran == []
    assert {row["output"] for row in rows} == {f"a{sign}b"}


def unused(request: SweepRequest, place: object) -> list[Lane]:
    raise AssertionError("nothing is opened for a file that is refused")


def test_a_cut_line_is_taken_off_without_writing_the_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "k.jsonl"
    on_paper(kept, prompts=1)
    whole, place = kept.read_bytes(), kept.stat().st_ino
    kept.write_bytes(whole + b'{"key": "half')
    monkeypatch.setattr(Path, "write_text", unused)
    assert on_paper(kept, prompts=1)[0] == []
    assert (kept.read_bytes(), kept.stat().st_ino) == (whole, place)


@pytest.mark.parametrize("text", ["a letter", '{"about": 1}', '{"about": 1}\n', "[1]\n{"])
def test_a_file_of_something_else_is_refused_as_it_is(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "k.jsonl"
    kept.write_text(text)
    with pytest.raises(ValueError, match="does not hold trials"):
        sweep(SweepRequest(**SMALL), kept, tmp_path, lambda *told: None, open_lanes=unused)
    assert kept.read_text() == text


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    kept, told = tmp_path / "k.jsonl", []

    def second(*report: object) -> None:
        with pytest.raises(ValueError, match=r"another process is measuring into 'k.jsonl'") as caught:
            sweep(SweepRequest(**SMALL), kept, tmp_path, lambda *told: None, open_lanes=unused)
        told.append(str(caught.value))

    sweep(SweepRequest(**SMALL), kept, tmp_path, second, open_lanes=lambda request, place: [Paper([])])
    assert len(told) == 12
    assert on_paper(kept)[0] == [], "and the file is free again afterwards"
