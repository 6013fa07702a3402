"""Several questions about one context on the command line: it is read once and placed alike for all, a run each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_cli import kvlens

from kvlens import tasks
from kvlens.demo.encode import demo_encode
from kvlens.meta import RunMeta
from kvlens.runs import carrying
from kvlens.runs.preparing import READINGS
from kvlens.store.reader import TraceReader

QUESTIONS = ("What is the code of the gate?", "Who is at the gate, and what is the code there?", "Why?")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv(READINGS, raising=False)
    return tmp_path / "runs"


@pytest.fixture
def context(tmp_path: Path) -> Path:
    asked = tasks.get("needle").make(400, 0.5, 3, demo_encode())
    path = tmp_path / "context.txt"
    path.write_text(asked.text)
    return path


def asks(*questions: str) -> list[str]:
    return [part for question in questions for part in ("--ask", question)]


def placed(runs: Path, uid: str) -> tuple[RunMeta, pd.DataFrame, list[pd.DataFrame]]:
    """Meta, tokens, and where prefill left what: spans, how they lie in the cold tier, what was dropped and what was
    moved before the first step."""
    with TraceReader.open(runs, uid) as reader:
        spans, events, moved = reader.spans(), reader.events(), reader.transfers()
        born = spans[spans["born_step"] < 0][["span", "kind", "tok_start", "tok_end", "mean_surprisal", "state"]]
        heads = reader.span_heads()
        heads = heads[heads["span"].isin(born["span"])]
        moved = moved[["step", "layer", "kv_head", "span", "direction", "cause", "bytes"]]
        early = [table[table["step"] < 0] for table in (events, moved)]
        tables = [table.reset_index(drop=True) for table in (born, heads, *early)]
        return reader.meta, reader.tokens(), tables


@pytest.mark.parametrize("method", ["snapkv", "freekv", "h2o"])
def test_the_runs_have_the_same_placement_and_a_question_each(
    method: str, runs: Path, context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvlens(
        "run",
        str(context),
        "--model",
        "demo",
        "--method",
        method,
        "--budget",
        "60%",
        "--max-new",
        "4",
        "--ignore-eos",
        "--question",
        "after",
        *asks(*QUESTIONS),
    )
    said = capsys.readouterr().out
    uids = said.strip().splitlines()[-3:]
    assert len(set(uids)) == 3
    assert all(question in " ".join(said.split()) or question[:20] in said for question in QUESTIONS)
    found = [placed(runs, uid) for uid in uids]
    for (meta, tokens, _), question in zip(found, QUESTIONS, strict=True):
        fed = tokens[tokens["step"].notna()].sort_values("step")["text"]
        assert "".join(fed.iloc[: meta.asked_steps]).strip() == question
    steps = {meta.max_new for meta, _, _ in found}
    assert steps == {4 + max(meta.asked_steps for meta, _, _ in found)}, "divided alike, four for the longest one"
    assert [meta.prompt_kept for meta, _, _ in found] == [False, True, True], "read once"
    assert len({(meta.prompt_tokens, meta.budget_bytes) for meta, _, _ in found}) == 1
    for _, _, tables in found[1:]:
        for ours, first in zip(tables, found[0][2], strict=True):
            pd.testing.assert_frame_equal(ours, first)
    assert len(found[0][2][0]) > 0
    assert len(found[0][2][2]) > 0
    assert READINGS not in os.environ


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (asks("What?", "Why?"), "several questions share a placement only when they are fed after it: add --question"),
        ([*asks("What?", "Why?"), "--question", "after", "--answer", "7"], "--answer is what one question's answer"),
        ([*asks("What?", " "), "--question", "after"], "the question is empty: say what is asked"),
        ([*asks("What?", "Why? " * 3000), "--question", "after"], "shorten the prompt or lower --max-new"),
    ],
)
def test_what_is_wrong_with_any_of_them_is_said_before_the_first_is_run(
    more: list[str], sentence: str, runs: Path, context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kvlens("run", str(context), "--model", "demo", "--method", "h2o", *more)
    said = capsys.readouterr()
    assert sentence in " ".join(said.err.split())
    assert said.out == ""
    assert not list(runs.glob("*/trace.duckdb"))


def test_runs_before_one_that_fails_are_kept_and_named(
    runs: Path, context: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, asked = carrying._store_run, []

    def failing(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 2:
            raise ValueError("full.")
        return stored(*given)

    monkeypatch.setattr(carrying, "_store_run", failing)
    with pytest.raises(SystemExit):
        kvlens("run", str(context), "--model", "demo", "--method", "h2o", "--question", "after", *asks(*QUESTIONS))
    said = capsys.readouterr()
    assert "full." in said.err
    uid = said.out.strip()
    assert (runs / uid / "trace.duckdb").is_file()
    assert len(asked) == 2
    assert READINGS not in os.environ
