"""Full KV is compared with the model's own generate once per model, past its RoPE border, and the verdict is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlens.checking.models import random_llama
from kvlens.cli.main import main
from kvlens.engine.engine import Engine
from kvlens.records import SelfCheck
from kvlens.runs import modelcheck
from kvlens.runs.modelcheck import (
    DIFFERS,
    EQUAL,
    MODEL_CHECK,
    NEW,
    SHORT,
    UNCHECKED,
    ModelCheck,
    check_model,
    first_check,
)
from kvlens.runs.storing import _model_checks

BORDER = 64
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of models without verdicts, and with no other models."""
    monkeypatch.setattr(modelcheck, "cache_dir", lambda: tmp_path)
    return tmp_path


def engine(**changes: Any) -> Engine:
    """A random Llama whose tokenizer gives a number per word."""
    loaded = random_llama(**changes)

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + sum(map(ord, word)) % 500 for word in text.split()]}

    tokenizer.decode = lambda ids, **settings: "x"  # type: ignore[attr-defined]
    return Engine(replace(loaded, tokenizer=tokenizer))


def test_a_model_without_a_border_is_compared_on_a_short_prompt() -> None:
    verdict = check_model(engine(), "weights")
    assert (verdict.verdict, verdict.tokens, verdict.border, verdict.compared) == (EQUAL, SHORT, None, NEW)


def test_a_model_with_a_border_is_compared_past_it() -> None:
    verdict = check_model(engine(rope_parameters=ROPE | FACTORS, max_position_embeddings=256), "weights")
    assert (verdict.verdict, verdict.border) == (EQUAL, BORDER)
    assert verdict.tokens > 1.1 * BORDER


def test_another_output_is_named_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlens.checking import stock

    monkeypatch.setattr(stock, "generated", lambda model, ids, new: [1] * new)
    verdict = check_model(engine(), "weights")
    assert (verdict.verdict, verdict.compared) == (DIFFERS, 0)
    checks = _model_checks(verdict)
    assert [(check.name, check.passed) for check in checks] == [(MODEL_CHECK, False)]


def test_a_verdict_is_kept_by_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    made, count = engine(), []
    compare = modelcheck._compare
    monkeypatch.setattr(modelcheck, "_compare", lambda engine: count.append(1) or compare(engine))
    verdicts = [first_check(made, name) for name in ("weights", "weights", "other weights")]
    assert len(count) == 2
    assert verdicts[0] == verdicts[1]
    assert modelcheck.checks_of("random")[0].verdict == EQUAL
    assert modelcheck.checks_of("another") == []


def test_a_first_run_of_a_large_model_is_not_compared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelcheck, "FIRST_RUN_WORK", {"cpu": 1.0})
    verdict = first_check(engine(), "weights")
    assert (verdict.verdict, verdict.tokens) == (UNCHECKED, SHORT)
    assert "kvlens doctor --model random" in verdict.sentence
    assert not list(cache.rglob("*.json"))
    assert _model_checks(verdict) == []


def test_a_prompt_that_does_not_fit_into_memory_is_said_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelcheck, "_free_bytes", lambda device: 1000)
    verdict = check_model(engine(), "weights")
    assert verdict.verdict == UNCHECKED
    assert "1 kB" in verdict.reason


def test_a_model_whose_generate_fails_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlens.checking import stock

    def broken(*arguments: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(stock, "generated", broken)
    verdict = first_check(engine(), "weights")
    assert (verdict.verdict, verdict.reason) == (UNCHECKED, "RuntimeError: no")


def test_a_damaged_verdict_is_made_again(cache: Path) -> None:
    made = engine()
    check_model(made, "weights")
    (path,) = cache.rglob("*.json")
    path.write_text("{")
    assert first_check(made, "weights").verdict == EQUAL
    assert json.loads(path.read_text())["verdict"] == EQUAL


def test_an_equal_model_is_a_self_check_of_its_runs() -> None:
    checks = _model_checks(ModelCheck(EQUAL, SHORT, None, NEW))
    assert checks == [SelfCheck("model equals its generate", True, float(NEW), checks[0].detail)]
    assert _model_checks(None) == []


def test_doctor_compares_a_model_and_models_show_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["kvlens", *arguments])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    assert command("doctor", "--model", "demo", "--json") == 0
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert (check["name"], check["passed"]) == (MODEL_CHECK.replace("model", "demo"), True)
    assert command("models", "show", "demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["generate"] == check["detail"]
    assert command("models", "list", "--json") == 0
    listed = {entry["name"]: entry["generate"] for entry in json.loads(capsys.readouterr().out)}
    assert listed["demo"] == EQUAL


def test_a_verdict_holds_for_the_files_and_versions_that_were_compared(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = {"random": "files", "copy": "files", "other": "other files"}
    monkeypatch.setattr(modelcheck, "file_stamp", stamps.__getitem__)
    assert modelcheck.worst_check("random") is None
    made = engine()
    check_model(made, "weights")
    kept = {name: modelcheck.worst_check(name) for name in stamps}
    assert {name: check is not None for name, check in kept.items()} == {"random": True, "copy": True, "other": False}
    stamps["random"] = "the same weights written again"
    assert modelcheck.worst_check("random") is None
    first_check(made, "weights")  # by the fingerprint the weights are those that were compared
    assert modelcheck.worst_check("random") is not None
    (path,) = cache.rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": []}))
    assert modelcheck.worst_check("random") is None
    first_check(made, "weights")  # a verdict lies where its versions say
    assert modelcheck.worst_check("random") is not None
    monkeypatch.setattr(modelcheck, "_versions", lambda: ("1", "2", "3"))
    assert modelcheck.worst_check("random") is None


def test_a_verdict_that_differs_is_listed_before_a_later_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlens.checking import stock

    made = engine()
    with monkeypatch.context() as other_output:
        other_output.setattr(stock, "generated", lambda model, ids, new: [1] * new)
        check_model(made, "weights")
    check_model(made, "the same weights in another format")
    worst = modelcheck.worst_check("random")
    assert worst is not None
    assert worst.verdict == DIFFERS


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"verdict": EQUAL}, "full KV equals generate"),
        ({"verdict": DIFFERS}, "full KV differs from generate"),
        ({"verdict": UNCHECKED}, "full KV not checked against generate"),
        ({"verdict": ["foreign"]}, "check against generate not recorded"),
        (None, "check against generate not recorded"),
    ],
)
def test_each_verdict_has_words_of_its_own(stored: dict[str, Any] | None, words: str) -> None:
    assert modelcheck.verdict_words(stored) == words


def test_the_verdict_is_in_the_meta_of_a_run(tmp_path: Path) -> None:
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.store.reader import TraceReader
    from kvlens.text.prompts import PromptText

    request = RunRequest(model="demo", method="snapkv", budget="50%", max_new=2, overrides={"window": 8})
    source = PromptText("The river was wide and the bridge was old. " * 8)
    uid, _, _ = carry_out(request, source, tmp_path / "runs", lambda *_: None, lambda: False)
    with TraceReader.open(tmp_path / "runs", uid) as reader:
        assert reader.meta.model_check is not None
        assert reader.meta.model_check["verdict"] == EQUAL
        assert MODEL_CHECK in set(reader.self_checks()["name"])
