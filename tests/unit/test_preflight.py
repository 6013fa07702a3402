"""Estimates before a run, against what the run then finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ggufs import stock, write
from support import ListSink, raises_code, run, task_prompt

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.runs.preflight import DECISION_BYTES, decision_rows, estimate, refuse
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import BadPrompt, PromptText


@pytest.mark.parametrize("name", list(methods.registry()))
def test_floor_is_what_the_run_asks_for(demo: Any, name: str) -> None:
    prompt, made = task_prompt(demo, "needle", 700, max_new=8)
    usual = "demo" if "demo" in methods.get(name).presets else None
    found = estimate(made.text, "demo", name, {}, "2tok", 8, usual)
    assert found["prompt_tokens"] == len(prompt.ids)
    assert found["full_kv_bytes"] == demo.shape.full_kv_bytes(len(prompt.ids) + 8)
    assert found["feasible"] in (False, None)
    assert found["warnings"]
    method = methods.get(name)
    params = methods.make_parameters(method, usual, {})
    with pytest.raises(BudgetInfeasible) as refused:
        Engine(demo).run(prompt, method, params, Budget.parse("2tok"), Options(max_new=8))
    if method.floor_is_exact:
        assert refused.value.smallest == found["min_budget_bytes"]
        assert found["feasible"] is False
    else:
        assert 0.4 < refused.value.smallest / found["min_budget_bytes"] < 2.5


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "chunkkv", "snapkv+kivi"])
def test_the_prompt_tokens_kept_are_what_the_run_attends(demo: Any, name: str) -> None:
    prompt, made = task_prompt(demo, "needle", 700, max_new=8)
    kept = estimate(made.text, "demo", name, {}, "40%", 8)["prompt_kept"]
    sink = ListSink()
    run(demo, prompt, name, budget="0.4", max_new=8, sink=sink)
    attended = sink.steps[0].kv["attended_tokens"].mean()
    assert 0.3 * len(prompt.ids) < kept < 0.4 * len(prompt.ids) or "kivi" in name
    whole_chunks = 16 if name == "chunkkv" else 0
    assert kept - whole_chunks <= attended <= kept + 2  # the step's own token and a fraction


def test_methods_that_drop_nothing_when_prefill_ends_keep_no_such_number() -> None:
    text = "The sky is blue. " * 40
    assert [estimate(text, "demo", name, {}, "50%", 8)["prompt_kept"] for name in ("quest", "h2o", "kivi")] == [
        None
    ] * 3


def test_what_is_not_known_is_none_and_said(tmp_path: Path) -> None:
    found = estimate("x", str(write(tmp_path / "m.gguf", stock("llama"), "llama")), "full", {}, None, 8)
    assert found["prompt_tokens"] is None
    assert "m.gguf" in found["warnings"][0]
    with raises_code("model_not_here", model="some/hub-model"):
        estimate("x", "some/hub-model", "full", {}, None, 8)
    with pytest.raises(ValueError, match="is not understood"):
        estimate("x", "demo", "full", {}, "much", 8)


def test_the_trace_counts_the_rows_of_decisions(demo: Any) -> None:
    shape, prompt = demo.shape, "word " * 300
    steps = {name: estimate(prompt, "demo", name, {}, "100%", 8)["step_bytes"] for name in ("full", "quest", "sekv")}
    assert steps["quest"] - steps["full"] == DECISION_BYTES * shape.layers * shape.kv_heads
    assert steps["sekv"] - steps["full"] == DECISION_BYTES * shape.layers * shape.q_heads
    for name, rows in (("quest", shape.kv_heads), ("sekv", shape.q_heads), ("full", 0)):
        assert decision_rows(methods.get(name).family, shape) == shape.layers * rows


def test_too_long_is_said() -> None:
    found = estimate("word " * 9000, "demo", "streaming_llm", {}, "0.5", 8)
    assert found["feasible"] is False
    assert any("shorten the prompt" in sentence for sentence in found["warnings"])
    assert any("--max-new" in sentence for sentence in found["warnings"]), "as the command line says it"


def test_the_chat_form_and_the_answers_beginning_count(smollm2_folder: Path) -> None:
    from kvlens.tasks.sample import sample_prompt

    source = sample_prompt()
    in_form = estimate(source, "smollm2", "full", {}, None, 8)["prompt_tokens"]
    assert in_form == 970, "as a run of it says"
    assert in_form - estimate(source, "smollm2", "full", {}, None, 8, chat="off")["prompt_tokens"] > 20


def test_a_question_that_nobody_marked_is_refused_before_anything_is_looked_at() -> None:
    request = RunRequest(model="no/such-model", method="full", question="after")
    with raises_code("question_unmarked", BadPrompt):
        refuse(request, PromptText("A text. And a question?"))
