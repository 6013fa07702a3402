"""What keywords of the API take: one thing or several, texts, and what is refused before anything is run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvlens
from kvlens import methods
from kvlens.api.asking import listed
from kvlens.api.pieces import pieces_of
from kvlens.methods.run_inputs import torch_seed
from kvlens.runs.request import MOST_SEED, MOST_THREADS

LIBRARY = re.compile("Value error|Input should|valid (integer|string|number|boolean)", re.IGNORECASE)
"""words of pydantic"""
TEXT = "The sun rises in the east. " * 20


def refused(call: Any) -> str:
    with pytest.raises(kvlens.KvlensError) as error:
        call()
    assert "--" not in str(error.value), "options of the command line are keywords here"
    return error.value.code


def test_one_thing_is_a_list_of_one() -> None:
    assert listed("40%") == ["40%"]
    assert listed(0.4) == [0.4]
    assert listed(int) == [int]
    assert listed(("20%", "40%")) == ["20%", "40%"]


def test_one_method_and_one_budget_make_a_study(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "demo", "progress": False, "max_new": 2, "runs": tmp_path}
    study = kvlens.study("needle@length=300@prompts=1", "streaming_llm", "40%", **settings)
    assert set(study.trials()["method"]) == {"full", "streaming_llm"}


def test_equal_budgets_are_one_arm(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "demo", "progress": False, "max_new": 2, "runs": tmp_path}
    study = kvlens.study("needle@length=300@prompts=1", "streaming_llm", ["40%", 0.4], **settings)
    assert len(study.matrix()) == 2, "full KV and one arm"


def test_a_study_of_an_absent_model_is_refused_and_not_stored(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"methods": ["streaming_llm"], "progress": False, "runs": tmp_path}
    with pytest.raises(kvlens.ModelError) as error:
        kvlens.study("needle@length=300", model="no/such", **asked)
    assert error.value.code == "unsupported_model"
    assert not kvlens.studies(runs=tmp_path).size


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"budgets": []}, "no_values"),
        ({"questions": ()}, "no_values"),
        ({"seeds": []}, "no_values"),
        ({"questions": ["before"]}, "bad_values"),
        ({"prompts": []}, "no_prompts"),
        ({"methods": []}, "no_method"),
        ({"dtype": "int3"}, "unsupported_model"),
    ],
)
def test_a_study_of_nothing_is_refused_and_not_stored(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    asked = {"prompts": "needle@length=300@prompts=1", "methods": ["streaming_llm"]} | changes
    assert refused(lambda: kvlens.study(**asked, model="demo", progress=False, runs=tmp_path)) == code
    assert not kvlens.studies(runs=tmp_path).size


def test_a_race_takes_parameters_of_its_methods_alone(tmp_path: Path) -> None:
    def race(**changes: Any) -> kvlens.Race:
        return kvlens.race(TEXT, "streaming_llm", model="demo", progress=False, runs=tmp_path, max_new=2, **changes)

    assert refused(lambda: race(parameters={"quest": {"page": 8}})) == "foreign_parameter"
    assert refused(lambda: race(presets={"quest": "paper"})) == "foreign_parameter"
    assert [run.meta.method for run in race()] == ["full", "streaming_llm"]


@pytest.mark.parametrize("changes", [{"answer": 4880}, {"needle": 3}, {"ask": ["x"]}])
def test_a_keyword_of_another_type_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(lambda: kvlens.run(TEXT, "full", model="demo", runs=tmp_path, **changes)) == "not_a_text"


@pytest.mark.parametrize("method", ["keyformer", "compactor", "random"])
@pytest.mark.parametrize("seed", [MOST_SEED, -MOST_SEED])
def test_methods_draw_with_every_seed_of_a_request(method: str, seed: int, tmp_path: Path) -> None:
    run = kvlens.run(TEXT, method, "50%", model="demo", runs=tmp_path, seed=seed, max_new=2, progress=False)
    assert (run.status, run.meta.seed) == ("completed", seed)


def test_small_seeds_are_drawn_with_as_they_are() -> None:
    assert [torch_seed(number) for number in (7, -7, 1 << 63)] == [7, -7, 1 << 63]
    assert {0 <= torch_seed(number) < 1 << 63 for number in (1 << 64, -(1 << 70) - 5)} == {True}


@pytest.mark.parametrize("seeds", [[MOST_SEED + 1], "x"])
def test_a_study_of_a_seed_that_no_run_can_have(seeds: Any, tmp_path: Path) -> None:
    prompts = "needle@length=300@prompts=1"
    assert refused(lambda: kvlens.study(prompts, "full", seeds=seeds, model="demo", runs=tmp_path)) == "bad_value"
    assert not kvlens.studies(runs=tmp_path).size


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ("",)},
        {"temperature": float("inf")},
        {"seed": MOST_SEED + 1},
        {"seed": -(1 << 70)},
        {"threads": MOST_THREADS + 1},
    ],
)
def test_a_setting_that_no_run_can_have(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(lambda: kvlens.run(TEXT, "full", model="demo", runs=tmp_path, **changes)) == "bad_value"


def test_observe_checks_what_it_is_given_before_the_block(tiny: Any) -> None:
    tokenizer = SimpleNamespace(decode=str)
    assert refused(lambda: kvlens.observe(tiny, tokenizer, answer=4880)) == "not_a_text"  # type: ignore[arg-type]
    assert refused(lambda: kvlens.observe(tiny, tokenizer, oracle="every=0")) == "bad_value"
    assert refused(lambda: kvlens.observe(tiny, None)) == "no_tokenizer"


@pytest.mark.parametrize("oracle", ["every=0", "layers=99", "often", 5])
def test_every_bad_oracle_has_one_code(oracle: Any, tmp_path: Path) -> None:
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.run(TEXT, "full", model="demo", runs=tmp_path, oracle=oracle, progress=False)
    assert (error.value.code, error.value.values) == ("bad_value", {"name": "oracle", "value": oracle})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new", "x"),
        ("max_new", 0),
        ("seed", 1.5),
        ("temperature", "x"),
        ("top_p", 2),
        ("coverage", "often"),
        ("stop", 3),
        ("chat", "x"),
        ("chat_args", 3),
        ("trace_level", "x"),
        ("trace_level", 3),
        ("budget", []),
        ("budget", True),
        ("budget_tokens", "x"),
        ("segments", 3),
        ("forced", "x"),
        ("against_full", 1),
        ("method", 3),
    ],
)
def test_a_setting_is_refused_in_words_of_kvlens(name: str, value: Any, tmp_path: Path) -> None:
    arguments = {"method": "full", "model": "demo", "runs": tmp_path, "progress": False, name: value}
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.run(TEXT, **arguments)
    assert (error.value.code, error.value.values) == ("bad_value", {"name": name, "value": value})
    assert not LIBRARY.search(str(error.value)), "a sentence of a library"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new", "x"),
        ("trace_level", "x"),
        ("budgets", [[]]),
        ("name", 3),
        ("presets", 3),
        ("values", 3),
        ("values", {"full": 3}),
        ("segments", 3),
        ("workers", "x"),
        ("batch", "x"),
        ("methods", 3),
    ],
)
def test_a_study_is_refused_in_words_of_kvlens(name: str, value: Any, tmp_path: Path) -> None:
    arguments = {"methods": "full", "model": "demo", "runs": tmp_path, "progress": False, name: value}
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.study("needle@length=300@prompts=1", **arguments)
    assert error.value.code == "bad_value"
    assert not LIBRARY.search(str(error.value)), "a sentence of a library"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{"presets": 3}, {"parameters": 3}, {"parameters": {"streaming_llm": 3}}])
def test_a_race_takes_mappings(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(lambda: kvlens.race(TEXT, "streaming_llm", model="demo", runs=tmp_path, **changes)) == "bad_value"


def test_searches_take_numbers(lost: kvlens.Run) -> None:
    for search in (lost.fewest_bytes, lost.fewest_bits, lambda most: lost.tips(most=most)):
        assert refused(lambda search=search: search(most="x")) == "bad_value"
    assert refused(lambda: lost.tips("sinks", "a", "b")) == "bad_value"  # type: ignore[arg-type]


def test_an_installed_class_is_its_name(tmp_path: Path) -> None:
    method = methods.get("streaming_llm")
    settings: dict[str, Any] = {"model": "demo", "runs": tmp_path, "progress": False, "max_new": 2}
    assert kvlens.run(TEXT, method, "40%", **settings).meta.method == "streaming_llm"
    assert [run.meta.method for run in kvlens.race(TEXT, [method], "40%", **settings)] == ["full", "streaming_llm"]
    error = refused(lambda: kvlens.run(TEXT, int, "40%", **settings))  # type: ignore[arg-type]
    assert error == "bad_request"


def test_a_range_ends_behind_its_beginning() -> None:
    assert refused(lambda: pieces_of(None, None, None, (), (50, 20))) == "bad_range"
    assert pieces_of(None, None, None, (), (20, 20))[0].tokens == (20, 21)


@pytest.mark.parametrize(
    "changes",
    [
        {"triples": 3},
        {"triples": [(0, 0)]},
        {"triples": ["abc"]},
        {"triples": [(0, 0.5, 1)]},
        {"tokens": (3,)},
        {"tokens": (3, 4.5)},
        {"tokens": (0, float("nan"))},
        {"tokens": 3},
    ],
)
def test_triples_and_ranges_are_whole_numbers(changes: dict[str, Any]) -> None:
    arguments = {"span": None, "layer": None, "kv_head": None, "triples": (), "tokens": None} | changes
    assert refused(lambda: pieces_of(**arguments)) == "bad_value"
    assert pieces_of(None, None, None, {(1, 0, 2)}, None)[0].span == 2  # type: ignore[arg-type]


def test_a_verdict_tells_a_token_that_is_back_from_an_answer() -> None:
    sentences = [
        str(kvlens.Verdict("kept", False, restored=restored, of_token=of_token))
        for restored in (None, True, False)
        for of_token in (False, True)
    ]
    assert sentences[0] == sentences[1]  # nothing was lost before
    assert len(set(sentences)) == 5
