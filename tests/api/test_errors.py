"""Errors of the API: a type, a code and values for each kind of bad input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvlens
from kvlens import methods
from kvlens.api.asking import Settings
from kvlens.api.words import in_python

TEXT = "The sun rises in the east. " * 20


def refused(kind: type[kvlens.KvlensError], call: Callable[[], Any]) -> kvlens.KvlensError:
    """What a call is refused with; one sentence."""
    with pytest.raises(kind) as error:
        call()
    sentence = str(error.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "--" not in sentence, "options of the command line are keywords here"
    return error.value


def run(text: Any = TEXT, **keywords: Any) -> kvlens.Run:
    return kvlens.run(text, **{"model": "demo", "progress": False, "max_new": 4} | keywords)


def test_two_kinds_of_budget() -> None:
    error = refused(kvlens.RequestError, lambda: run(budget="20%", budget_tokens=50))
    assert (error.code, error.values) == ("budget_twice", {"budget": "20%", "budget_tokens": 50})
    error = refused(kvlens.RequestError, lambda: run(budget_bytes=10_000, budget_tokens=50))
    assert set(error.values) == {"budget_bytes", "budget_tokens"}


@pytest.mark.parametrize(("word", "meant"), [("windw", "window"), ("max_neww", "max_new"), ("metod", "method")])
def test_an_unknown_keyword_names_what_is_close(word: str, meant: str) -> None:
    error = refused(kvlens.RequestError, lambda: run(method="snapkv", **{word: 3}))
    assert (error.code, error.values["name"]) == ("unknown_parameter", word)
    assert meant in error.values["close"]


def test_an_unknown_keyword_of_a_repeat(lost: kvlens.Run) -> None:
    error = refused(kvlens.RequestError, lambda: lost.at(sink=2))
    assert (error.code, error.values["close"]) == ("unknown_parameter", ["sinks"])


def test_an_unknown_method() -> None:
    assert refused(kvlens.RequestError, lambda: run(method="nothing_like_it")).code == "unknown_method"


def test_an_infeasible_budget_says_the_smallest(lost: kvlens.Run) -> None:
    error = refused(kvlens.RequestError, lambda: run(method="streaming_llm", budget_bytes=2_000))
    assert error.code == "budget_infeasible"
    values = error.values
    assert values["budget_bytes"] == 2_000
    assert 2_000 < values["smallest_bytes"] <= values["full_kv_bytes"]
    enough = run(method="streaming_llm", **values["would_do"])
    assert enough.meta.budget_bytes is not None
    assert enough.meta.budget_bytes >= values["smallest_bytes"]


@pytest.mark.parametrize(
    ("keywords", "code"),
    [
        ({"budget": "lots"}, "bad_request"),
        ({"max_new": 0}, "bad_value"),
        ({"question": "What is it?"}, "bad_value"),
        ({"chat": "on"}, "template_failed"),
        ({"question": "after"}, "bad_prompt"),
        ({"needle": "no such words"}, "bad_prompt"),
        ({"device": "abacus"}, "unsupported_model"),
        ({"dtype": "int3"}, "unsupported_model"),
        ({"model": "no-such-model"}, "unsupported_model"),
        ({"preset": "no-such-preset"}, "bad_request"),
        ({"tokenizer": object()}, "tokenizer_unused"),
    ],
)
def test_values_that_are_not_possible(keywords: dict[str, Any], code: str, runs: Path) -> None:
    before = set(runs.glob("*")) if runs.is_dir() else set()
    assert refused(kvlens.KvlensError, lambda: run(method="snapkv", **keywords)).code == code
    assert set(runs.glob("*") if runs.is_dir() else ()) == before, "a refused run leaves nothing behind"


def test_a_refusal_of_the_core_keeps_its_code_and_values() -> None:
    error = refused(kvlens.RequestError, lambda: run(method="snapkv", preset="no-such-preset"))
    assert (error.code, error.values) == ("bad_request", {"preset": "no-such-preset", "detail": "unknown_preset"})
    error = refused(kvlens.RequestError, lambda: run("a b " * 40_000, method="snapkv"))
    assert (error.code, error.values["detail"]) == ("bad_prompt", "too_long")
    assert error.values["tokens"] > error.values["most"]


@pytest.mark.parametrize("text", ["", "  \n", "a\x00b", 7, Path("no-such-file.txt"), [{"role": "user"}], []])
def test_prompts_that_are_none(text: Any) -> None:
    assert refused(kvlens.RequestError, lambda: run(text)).code == "bad_prompt"


def test_a_run_that_is_not_there(runs: Path) -> None:
    for named in ("20200101-000000-abcdef", "nothing", runs / "20200101-000000-abcdef"):
        assert refused(kvlens.RunError, lambda named=named: kvlens.open(named)).code == "unknown_run"  # type: ignore[misc]


def test_repeats_that_name_nothing_or_what_is_not_there(lost: kvlens.Run) -> None:
    assert refused(kvlens.RequestError, lambda: lost.hold(layer=1, kv_head=0)).code == "nothing_named"
    assert refused(kvlens.RequestError, lambda: lost.at()).code == "nothing_changed"
    assert refused(kvlens.RequestError, lambda: lost.at("20%", budget_bytes=9)).code == "budget_twice"
    assert refused(kvlens.RequestError, lambda: lost.hold(span=9_999, progress=False)).code == "bad_request"
    assert refused(kvlens.RequestError, lambda: lost.hold(span=1, layer=99, progress=False)).code == "bad_request"


def test_a_run_that_failed_a_self_check_is_stored_and_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.lens.severity.failed_checks", lambda reader: ("bytes",))
    error = refused(kvlens.RunError, lambda: run(method="streaming_llm", budget="60%"))
    assert (error.code, error.values["failed"]) == ("self_check_failed", ["bytes"])
    assert kvlens.open(error.values["uid"]).status == "completed"


def test_lists_refuse_what_they_do_not_have() -> None:
    assert refused(kvlens.RequestError, lambda: kvlens.runs(outcome="loss")).values["close"] == ["lost"]
    assert refused(kvlens.RequestError, lambda: kvlens.methods("prompt_evicton")).code == "unknown_family"


def test_lists_of_a_folder_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "none"
    for listed in (kvlens.runs, kvlens.studies, kvlens.retrieval_heads, lambda runs: kvlens.table("steps", runs=runs)):
        error = refused(kvlens.RequestError, lambda listed=listed: listed(runs=folder))  # type: ignore[misc]
        assert (error.code, error.values) == ("folder_missing", {"folder": str(folder)})
    monkeypatch.setenv("KVLENS_RUNS", str(folder))
    assert (len(kvlens.runs()), len(kvlens.studies())) == (0, 0), "the default folder may not exist yet"
    assert not folder.exists()


def test_errors_are_of_one_tree_and_of_python_s_own_kinds() -> None:
    for kind, python in ((kvlens.RequestError, ValueError), (kvlens.ModelError, ValueError)):
        assert issubclass(kind, kvlens.KvlensError)
        assert issubclass(kind, python)
    assert issubclass(kvlens.RunError, LookupError)
    assert issubclass(kvlens.Interrupted, KeyboardInterrupt)
    assert not issubclass(kvlens.Interrupted, Exception), "a loop that catches Exception ends all the same"


def test_no_parameter_of_a_method_has_the_name_of_a_keyword() -> None:
    keywords = {*inspect.signature(kvlens.run).parameters, *Settings.__annotations__} - {"keywords"}
    taken = {
        (name, parameter["name"])
        for name in methods.registry()
        for parameter in methods.entry(name)["parameters"]
        if parameter["name"] in keywords
    }
    assert taken == set()


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("lower --max-new.", "lower max_new."),
        ("run with --chat off, or change it.", 'run with chat="off", or change it.'),
        ("raise --budget to 23.5% or change it.", 'raise budget to "23.5%" or change it.'),
        ("raise --budget to 12%.", 'raise budget to "12%".'),
        ("--set keep=0.2 lets it.", "keep=0.2 lets it."),
        ("take --no-coverage (a copy).", "take coverage=False (a copy)."),
        ("fetch it by `kvlens models add X --hub`.", "fetch it by `kvlens models add X --hub`."),
    ],
)
def test_options_become_keywords(sentence: str, words: str) -> None:
    assert in_python(sentence) == words
