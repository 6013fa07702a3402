"""What a person can get wrong: one clear sentence on stderr, exit status 1, and nothing stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import raises_code

from kvlens.cli.main import main
from kvlens.models import find
from kvlens.refusal import Refusal
from kvlens.runs.entrants import entrants
from kvlens.runs.request import parse_set


def kvlens(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvlens", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    (tmp_path / "ok.txt").write_text("The code of Ann is 4821. " * 30)
    (tmp_path / "latin1.txt").write_bytes("Zürich".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n ")
    (tmp_path / "nul.txt").write_bytes(b"a\x00b")
    (tmp_path / "long.txt").write_text("word " * 9000)
    (tmp_path / "bad.json").write_text('{"prompt": "x"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text('{"text": "abc", "needle": ' + "[" * 200_000 + "]" * 200_000 + "}")
    (tmp_path / "endless.json").write_text('{"text": "abc", "needle": [[0, Infinity]]}')
    (tmp_path / "half.json").write_text(r'{"text": "The code \ud800 of Ann"}')
    (tmp_path / "halfanswer.json").write_text(r'{"text": "abc", "answer": "\udfff"}')
    (tmp_path / "digits.json").write_text('{"text": "abc", "needle": [[0, ' + "9" * 5000 + "]]}")
    (tmp_path / "needle.json").write_text(json.dumps({"text": "abc", "needle": [[1, 9]]}))
    return tmp_path


def config(folder: Path, name: str, **fields: Any) -> str:
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


CASES = {
    "not UTF-8": (["run", "{}/latin1.txt"], "is not UTF-8 text"),
    "empty": (["run", "{}/empty.txt"], "is empty"),
    "NUL": (["run", "{}/nul.txt"], "NUL"),
    "too long": (["run", "{}/long.txt", "--method", "full"], "shorten the prompt or lower --max-new"),
    "no file": (["run", "{}/absent.txt"], "there is no prompt file"),
    "json without text": (["run", "{}/bad.json"], 'a string "text"'),
    "broken json": (["run", "{}/broken.json"], "not valid JSON"),
    "deep json": (["run", "{}/deep.json"], "nested too deep"),
    "endless needle": (["run", "{}/endless.json"], "character ranges"),
    "half a character": (["run", "{}/half.json"], "lone surrogate"),
    "half an answer": (["run", "{}/halfanswer.json"], "lone surrogate"),
    "half an answer asked for": (["run", "{}/ok.txt", "--answer", "a\udc80"], "lone surrogate"),
    "a number of many digits": (["run", "{}/digits.json"], "not valid JSON"),
    "needle outside": (["run", "{}/needle.json"], "lies outside the text"),
    "needle not there": (
        ["run", "{}/ok.txt", "--needle", "The code of Bob"],
        "the passage 'The code of Bob' is not in the prompt",
    ),
    "unknown method": (["run", "{}/ok.txt", "--method", "magic"], "unknown method 'magic'; did you mean magicpig?"),
    "unknown parameter": (
        ["run", "{}/ok.txt", "--method", "full", "--set", "pages=3"],
        "has no parameter 'pages'; it has: page",
    ),
    "method nearly": (["run", "{}/ok.txt", "--method", "snapkvv"], "unknown method 'snapkvv'; did you mean snapkv?"),
    "method unlike any": (["run", "{}/ok.txt", "--method", "zz"], "unknown method 'zz'; `kvlens methods` lists all."),
    "wrong type": (
        ["run", "{}/ok.txt", "--method", "full", "--set", "page=big"],
        "page takes a whole number, not 'big'",
    ),
    "out of range": (["run", "{}/ok.txt", "--method", "full", "--set", "page=0"], "page must be at least 1"),
    "not name=value": (["run", "{}/ok.txt", "--set", "page"], "--set takes name=value"),
    "unknown preset": (["run", "{}/ok.txt", "--method", "full", "--preset", "x"], "has no preset 'x'"),
    "bad budget": (["run", "{}/ok.txt", "--budget", "lots"], "give a share of full KV"),
    "infeasible": (["run", "{}/ok.txt", "--method", "streaming_llm", "--budget", "1tok"], "budget_infeasible"),
    "no tokens": (["run", "{}/ok.txt", "--max-new", "0"], "--max-new"),
    "no cuda": (["run", "{}/ok.txt", "--device", "cuda"], "no CUDA device"),
    "bad dtype": (["run", "{}/ok.txt", "--method", "full", "--dtype", "int8"], "float32, bfloat16 or float16"),
    "model folder missing": (["run", "{}/ok.txt", "--model", "{}/nowhere"], "is not a model folder"),
    "unknown task": (["prompt", "--task", "poem"], "unknown task"),
    "prompt too short": (["prompt", "--length", "5"], "at least"),
    "no such run": (["runs", "show", "20200101-000000-abcdef"], "There is no run"),
    "hostile uid": (["runs", "show", "../../etc"], "not a run id"),
    "unknown export": (["export", "20200101-000000-abcdef"], "There is no run"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = CASES[case]
    if torch.cuda.is_available() and case == "no cuda":
        arguments = [*arguments[:-1], "cuda:99"]
    code = kvlens(monkeypatch, *(a.replace("{}", str(folder)) for a in arguments))
    said = capsys.readouterr().err.strip()
    assert code == 1
    assert expected in said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


REFUSED = {
    "a folder": ["run", "{}"],
    "a folder of a race": ["race", "{}", "--methods", "snapkv"],
    "an empty budget": ["run", "{}/ok.txt", "--method", "snapkv", "--budget", ""],
    "an empty budget of a race": ["race", "{}/ok.txt", "--methods", "snapkv,streaming_llm", "--budget", ""],
    "a parameter twice": ["run", "{}/ok.txt", "--method", "snapkv", "--set", "window=8", "--set", "window=9"],
    "two presets of one lane": [
        *("race", "{}/ok.txt", "--methods", "snapkv"),
        *("--preset", "snapkv:demo", "--preset", "snapkv:paper"),
    ],
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_run_with_what_has_no_one_meaning(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [text.replace("{}", str(folder)) for text in REFUSED[case]]
    assert kvlens(monkeypatch, *arguments, "--model", "demo", "--max-new", "2") == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_a_prompt_of_ten_million_tokens_is_not_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("needle", "niah_single"):
        arguments = ("--task", task, "--length", "10000000", "--out", str(folder / "made.txt"))
        assert kvlens(monkeypatch, "prompt", "--model", "demo", *arguments) == 1
    assert not (folder / "made.txt").exists()


def test_what_is_given_twice_is_refused_by_its_code() -> None:
    assert parse_set(["a=1", "b=2"]) == {"a": "1", "b": "2"}
    with raises_code("set_twice", Refusal, name="a"):
        parse_set(["a=1", " a=2"])
    with raises_code("set_twice", Refusal, name="snapkv"):
        entrants("snapkv", ["snapkv:demo", "snapkv:paper"], [])
    assert [lane.preset for lane in entrants("snapkv,snapkv", ["snapkv:demo", "snapkv:paper"], [])] == ["demo", "paper"]


def test_models_that_cannot_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(model: str) -> str:
        assert kvlens(monkeypatch, "run", str(folder / "ok.txt"), "--method", "full", "--model", model) == 1
        return capsys.readouterr().err

    bare = config(folder, "bare", model_type="llama")
    assert "no .safetensors weights" in said(bare)
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    assert ".safetensors" in said(str(folder / "pickled"))
    with raises_code("pickled_weights", model=str(folder / "pickled")):
        find.resolve(str(folder / "pickled"))
    for kind, reason in (
        ("gemma3", "images"),
        ("bloom", "bypasses"),
        ("t5", "encoder-decoder"),
        ("mamba", "no KV cache"),
    ):
        path = config(folder, kind, model_type=kind)
        save_file({"w": torch.zeros(1)}, f"{path}/model.safetensors")
        text = said(path)
        assert "not supported" in text
        assert reason in text
