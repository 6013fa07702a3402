"""Carried turns of races and studies: every run of a conversation carries them, and a prompt alone has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import raises_code
from test_carried_turns import LAST, MESSAGES, REST, TURNS, model, status_of, stored
from test_chat import CHATML, tokenizer

import kvlens
from kvlens.refusal import Refusal
from kvlens.text.carried import FAULTS, has_user_turns
from kvlens.text.messages import decode_conversation

ALONE = {"id": "alone", "question": "Which code has the red door?", "context": "The code is 4071. " * 6}
TALK = {"id": "talk", "messages": MESSAGES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokenizer, beside a conversation and a file of prompts."""
    made = tmp_path / "model"
    model().save_pretrained(made)
    tokenizer(CHATML).save_pretrained(made)
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [{"role": "system", "content": "Hi."}, *MESSAGES]}))
    rows = (TALK, ALONE)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def command(folder: Path, name: str, file: str, *options: str) -> int:
    """Run a command of the fixture's model on one of its files."""
    names = ("--model", str(folder), "--runs", str(folder.parent / "runs"), "--methods", "snapkv", "--max-new", "4")
    return status_of(["kvlens", name, str(folder.parent / file), *names, *options])


def requests(folder: Path) -> dict[tuple[str, int], Any]:
    """(method, earlier turns) -> whether the stored run carried them."""
    runs = [run.meta for run in stored(folder.parent / "runs")]
    return {(meta.method, len(meta.request.get("turns", ()))): meta.request.get("carried", False) for meta in runs}


@pytest.mark.parametrize(("turns", "carried"), [("carried", True), ("anew", False), (None, False)])
def test_every_lane_of_a_race_has_the_turns_of_the_command(folder: Path, turns: str | None, carried: bool) -> None:
    options = ("--budget", "60%", "--preset", "snapkv:fit", "--ignore-eos", *(("--turns", turns) if turns else ()))
    assert command(folder, "race", "talk.json", *options) == 0
    earlier = len(TURNS) + len(REST)
    assert requests(folder) == {("full", earlier): carried, ("snapkv", earlier): carried}
    for run in stored(folder.parent / "runs"):
        assert run.meta.request["system"] == "Hi."
        assert (run.meta.question_tokens > 0) is carried


def test_a_race_refuses_unknown_turns_and_two_system_messages(folder: Path) -> None:
    assert command(folder, "race", "talk.json", "--turns", "maybe") == 1
    assert command(folder, "race", "talk.json", "--system", "Two.") == 1
    assert not (folder.parent / "runs").exists()


def test_a_race_of_the_api_carries_turns(tmp_path: Path) -> None:
    given = {"model": model(), "tokenizer": tokenizer(CHATML), "runs": tmp_path, "progress": False}
    settings: dict[str, Any] = {"max_new": 4, "ignore_eos": True, "presets": {"snapkv": "fit"}}
    race = kvlens.race(MESSAGES, ["snapkv"], "60%", turns="carried", **settings, **given)
    assert [run.meta.method for run in race] == ["full", "snapkv"]
    anew = kvlens.race(MESSAGES, ["snapkv"], "60%", turns="anew", **settings, **given)
    fed = [run.meta.question_tokens for run in (*race, *anew)]
    assert fed[0] == fed[1] > 0
    assert fed[2] == fed[3] == 0
    assert race[0].meta.output_text == anew[0].meta.output_text, "full KV reads the same tokens"
    with raises_code("bad_request", kvlens.KvlensError, detail="nothing_to_carry"):
        kvlens.race(LAST, ["snapkv"], "60%", turns="carried", **settings, **given)


def test_a_study_carries_the_turns_of_its_conversations_alone(folder: Path) -> None:
    assert command(folder, "study", "prompts.jsonl", "--budgets", "80%", "--turns", "carried") == 0
    earlier = len(TURNS) + len(REST)
    assert requests(folder) == {
        ("full", earlier): True,
        ("snapkv", earlier): True,
        ("full", 0): False,
        ("snapkv", 0): False,
    }


def test_a_study_of_the_api_leaves_out_what_cannot_be_carried(tmp_path: Path) -> None:
    """A conversation whose first user message has no reply is a refused trial, whichever prompt is the first."""
    silent = {"id": "silent", "messages": [{"role": "user", "content": text} for text in ("Hi.", LAST)]}
    given = {"model": model(), "tokenizer": tokenizer(CHATML), "runs": tmp_path, "progress": False}
    study = kvlens.study([silent, TALK], ["snapkv"], ["80%"], turns="carried", max_new=4, **given)
    states = set(study.trials()[["prompt", "state"]].itertuples(index=False, name=None))
    assert states == {("silent", "refused"), ("talk", "completed")}
    with raises_code("bad_request", kvlens.KvlensError, detail="unknown_turns"):
        kvlens.study([TALK], ["snapkv"], turns="maybe", **given)


def test_a_conversation_with_several_user_messages_can_be_carried() -> None:
    assert [has_user_turns(turns) for turns in ((), TURNS[1:2], TURNS[:2], TURNS[:1])] == [False, False, True, True]
    assert FAULTS == ("nothing_to_carry", "reply_not_found")


def test_the_bytes_of_a_file_are_a_conversation_or_a_prompt() -> None:
    talk = decode_conversation(json.dumps({"messages": MESSAGES, "answer": "4071"}).encode(), "talk.json")
    assert (talk.prompt.text, talk.prompt.answer, talk.turns) == (LAST, "4071", (*TURNS, *REST))
    alone = decode_conversation(b"Say the code.", "talk.txt")
    assert (alone.prompt.text, alone.system, alone.turns) == (LAST, None, ())
    with pytest.raises(Refusal):
        decode_conversation(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}).encode(), "talk.json")
