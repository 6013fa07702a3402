"""A run that names no budget: the usual share of full KV where the method can hold it, more where it cannot."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any

import pytest

from kvlens import methods
from kvlens.budget import WHOLE, BudgetInfeasible
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.models import find
from kvlens.runs.carrying import carry_out
from kvlens.runs.preflight import estimate, refuse
from kvlens.runs.request import AUTO, DEFAULT_SHARE, RunRequest
from kvlens.store.reader import TraceReader
from kvlens.tasks.encoding import encoding
from kvlens.text.prompts import PromptText

LENGTHS = (1, 5, 20, 51, 200, 1000)


def prompt_of(tokens: int, model: str) -> str:
    """Return a text of about so many of the model's tokens: exactly so many for the toy."""
    if model == "demo":
        encode, text = demo_encode(), make_prompt("needle", 1400, 0.5, 0, demo_encode()).text
        end = bisect.bisect_right(range(len(text)), tokens, key=lambda cut: len(encode(text[:cut])))
        return text[: end - 1]
    return " apple" * tokens


@pytest.fixture
def real_model(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model is in memory, as in the app's warm process."""
    monkeypatch.setattr(find, "_kept", {})
    find.keep_model("smollm2", smollm2)


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_default_runs_a_prompt_of_any_length(tokens: int, tmp_path: Path) -> None:
    lines: list[str] = []
    request, prompt = RunRequest(model="demo", max_new=4), PromptText(prompt_of(tokens, "demo"))
    assert len(encoding("demo", "off").encode(prompt.text)) == tokens
    uid, status, _ = carry_out(request, prompt, tmp_path, lambda *_: None, lambda: False, lines.append)
    assert status == "completed"
    with TraceReader.open(tmp_path, uid) as reader:
        assert reader.meta.method == methods.DEFAULT
        assert all(reader.self_checks().passed)
        if tokens == 1000:
            assert (reader.meta.budget, lines) == (DEFAULT_SHARE, [])
        else:
            assert float(reader.meta.budget.rstrip("%")) > float(DEFAULT_SHARE)
            assert lines


@pytest.mark.parametrize("model", ["demo", "smollm2"])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("method", [methods.DEFAULT, "snapkv", "freekv", "quest", "chunkkv", "infllm"])
def test_nothing_is_refused_before_loading_where_no_budget_is_named(
    method: str, tokens: int, model: str, smollm2_folder: Path
) -> None:
    text = prompt_of(tokens, model)
    refuse(RunRequest(model=model, method=method), PromptText(text))
    found = estimate(text, model, method, {}, None, 64)
    assert (found["feasible"], found["instead"], found["warnings"]) == (True, None, [])
    named = estimate(text, model, method, {}, DEFAULT_SHARE, 64)
    if found["room"] is None and not methods.get(method).keeps_all:
        assert found["budget_bytes"] == named["budget_bytes"]
    elif found["room"] is not None:
        assert found["budget_bytes"] is None or found["budget_bytes"] > named["budget_bytes"]


@pytest.mark.slow
@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_default_runs_on_a_real_model_too(tokens: int, tmp_path: Path) -> None:
    request, prompt = RunRequest(model="smollm2", max_new=2), PromptText(prompt_of(tokens, "smollm2"))
    uid, status, _ = carry_out(request, prompt, tmp_path, lambda *_: None, lambda: False)
    with TraceReader.open(tmp_path, uid) as reader:
        assert (status, reader.meta.prompt_tokens > tokens) == ("completed", True), "the chat form comes on top"
        assert all(reader.self_checks().passed)


def test_a_budget_that_is_named_is_kept_or_refused(tmp_path: Path) -> None:
    request, prompt = RunRequest(model="demo", budget="20%"), PromptText(prompt_of(51, "demo"))
    with pytest.raises(BudgetInfeasible) as refused:
        carry_out(request, prompt, tmp_path, lambda *_: None, lambda: False)
    assert refused.value.smallest > refused.value.budget
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("loaded_once")
def test_reading_the_prompt_may_show_that_more_room_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The estimate is far too small here, so that only the memory refuses, and the run begins again with room."""
    sekv = methods.get(methods.DEFAULT)
    monkeypatch.setattr(sekv, "likely_bytes", classmethod(lambda *_: 1))
    monkeypatch.setattr(sekv, "bound_bytes", classmethod(lambda *_: 0))
    prompt = PromptText(prompt_of(200, "demo"))
    uid, status, _ = carry_out(RunRequest(model="demo", max_new=4), prompt, tmp_path, lambda *_: None, lambda: False)
    with TraceReader.open(tmp_path, uid) as reader:
        assert (status, reader.meta.budget != DEFAULT_SHARE) == ("completed", True)
        assert all(reader.self_checks().passed)
    assert len(list(tmp_path.glob("*/trace.duckdb"))) == 1


def test_auto_is_a_budget_that_is_not_named() -> None:
    assert RunRequest(budget=AUTO).budget is None
    assert RunRequest(budget=WHOLE).budget == WHOLE
