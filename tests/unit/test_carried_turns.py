"""A conversation whose cache is carried over turns: the first turn is placed, all later tokens are fed to its cache."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises_code
from test_chat import CHATML, TRIMMING, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import kvlens
from kvlens.api.progress import Progress
from kvlens.api.words import in_python
from kvlens.cli.main import main
from kvlens.cli.progress import Bar
from kvlens.lens.condition import ANEW, CARRIED, condition
from kvlens.lens.severity import failed_checks
from kvlens.refusal import Refusal
from kvlens.tasks.encoding import first_turn_tokens
from kvlens.text.carried import fill_replies, first_reply, parse_turns
from kvlens.text.prompts import PromptText, tokenize

TURNS = (("user", "The code of the red door is 4071. " * 4), ("assistant", "I see."), ("user", "And blue?"))
REST = (("assistant", "Unknown."),)
LAST = "Say the code."
MESSAGES = [{"role": role, "content": text} for role, text in (*TURNS, *REST, ("user", LAST))]


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)).eval()


def go(folder: Path, messages: Any, method: str = "full", budget: Any = None, **settings: Any) -> Any:
    values = {"ignore_eos": True, "max_new": 6, "progress": False, **settings}
    return kvlens.run(messages, method, budget, model=model(), tokenizer=tokenizer(CHATML), runs=folder, **values)


def status_of(command: list[str]) -> int:
    """Run a command in this process and return its exit status."""
    before, sys.argv = sys.argv, command
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize(
    ("system", "turns"),
    [
        (None, TURNS),
        (None, (("user", "Pick a or b."), ("assistant", "a"))),
        (None, (("user", "Which?"), ("assistant", "end"))),
        (None, (("user", "Which?"), ("assistant", "assistant"))),
        ("Answer Hi with: I see.", (("user", "Hi"), ("assistant", "I see."))),
    ],
)
def test_the_first_turn_is_placed_as_it_was_when_it_ran(
    template: str, system: str | None, turns: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """The cut is the prompt of the first turn alone, also where the template or the system message holds the words of
    the turn; cut and rest are the whole conversation. What is foreseen of the turn is what is placed."""
    words, more = tokenizer(template), () if turns != TURNS else REST
    first = tokenize(PromptText(turns[0][1]), words, None, 8, system=system)
    whole = tokenize(PromptText(LAST), words, None, 8, system=system, turns=(*turns, *more))
    carried = tokenize(PromptText(LAST), words, None, 8, system=system, turns=(*turns, *more), carried=True)
    assert carried.ids == first.ids
    assert (*carried.ids, *carried.asked) == whole.ids
    words.save_pretrained(tmp_path)
    assert first_turn_tokens(tmp_path, "auto", system, (*turns, *more), {}) == len(first.ids)


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_full_kv_carried_is_generate_over_the_whole_conversation(tmp_path: Path, method: str) -> None:
    """Full KV, and an eviction whose budget holds all."""
    run = go(tmp_path, MESSAGES, method, "100%", turns="carried")
    words = tokenizer(CHATML)
    ids = words.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    stock = model().generate(ids["input_ids"], max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert run.meta.output_text == words.decode(stock, skip_special_tokens=True)
    assert run.meta.question_tokens > 0
    assert run.meta.request["carried"] is True


def test_what_the_first_turn_evicted_stays_evicted(tmp_path: Path) -> None:
    """Later turns change nothing of what is kept of the first; anew they do, and the header says which was run."""
    other = [*MESSAGES[:-1], {"role": "user", "content": "Which door is red, and why?"}]
    kept = {}
    for way in ("carried", "anew"):
        runs = [go(tmp_path, talk, "snapkv", "200tok", turns=way, tokens=40, window=8) for talk in (MESSAGES, other)]
        rows = [run.reader.span_rows() for run in runs]
        pages = [[(row.tok_start, row.reason) for row in spans if row.kind == "page"][:5] for spans in rows]
        kept[way] = pages[0] == pages[1]
        assert (CARRIED if way == "carried" else ANEW) in condition([runs[0].reader])
    assert kept == {"carried": True, "anew": False}


def test_a_repeat_carries_the_same_turns(tmp_path: Path) -> None:
    run = go(tmp_path, MESSAGES, "snapkv", "200tok", turns="carried", window=8)
    again = run.at("220tok")
    assert again.meta.request["carried"] is True
    assert again.meta.question_tokens == run.meta.question_tokens


@pytest.mark.parametrize("method", ["h2o", "streaming_llm", "quest", "keydiff"])
def test_other_families_carry(tmp_path: Path, method: str) -> None:
    run = go(tmp_path, MESSAGES, method, "90%", turns="carried", preset="fit", against_full=False)
    assert run.status == "completed"
    assert not failed_checks(run.reader)


@pytest.mark.parametrize("way", ["carried", "anew"])
def test_a_user_message_without_a_reply_is_run_as_a_turn_of_its_own(tmp_path: Path, way: str) -> None:
    asked = [message for message in MESSAGES if message["role"] == "user"]
    last = go(tmp_path, asked, turns=way)
    turns = last.meta.request["turns"]
    assert [role for role, _ in turns] == ["user", "assistant"] * 2
    runs = {len(run.meta.request.get("turns", ())): run for run in stored(tmp_path)}
    assert sorted(runs) == [0, 2, 4], "a run per turn"
    assert [runs[0].meta.output_text.strip(), runs[2].meta.output_text.strip()] == [turns[1][1], turns[3][1]]
    assert "carried" not in runs[0].meta.request, "the first turn has nothing to carry"
    assert ("carried" in runs[2].meta.request) == ("carried" in last.meta.request) == (way == "carried")


def test_a_turn_that_is_cancelled_is_the_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn behind it is run."""
    asked = [message for message in MESSAGES if message["role"] == "user"]
    pressed: list[bool] = []

    def report(self: Progress, phase: str, done: int, total: int) -> None:
        if (phase, done) == ("decode", 3) and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "report", report)
    with pytest.raises(kvlens.Interrupted) as error:
        go(tmp_path, asked, turns="carried")
    (run,) = stored(tmp_path)
    assert (run.status, error.value.values) == ("cancelled", {"uid": run.uid})
    assert "turns" not in run.meta.request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokenizer, and `talk.json`, whose first user message has no reply."""
    made = tmp_path / "model"
    model().save_pretrained(made)
    tokenizer(CHATML).save_pretrained(made)
    asked = [message for message in MESSAGES if message["role"] == "user"]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": asked[1:]}))
    return made


def run_command(folder: Path, *options: str) -> int:
    names = ("--model", str(folder), "--runs", str(folder.parent / "runs"), "--method", "full", "--turns", "carried")
    command = ["kvlens", "run", str(folder.parent / "talk.json"), *names, "--max-new", "6", "--ignore-eos", *options]
    return status_of(command)


ASKED = ("--question", "after", "--ask", "Why?", "--ask", "Where?")


def test_several_questions_follow_the_turns_that_are_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs the user message without a reply, then each question on its cache."""
    assert run_command(folder, *ASKED) == 0
    uids = capsys.readouterr().out.split()[-2:]
    runs = stored(folder.parent / "runs")
    assert sorted(len(run.meta.request.get("turns", ())) for run in runs) == [0, 2, 2]
    (turn,) = (run for run in runs if run.uid not in uids)
    for run in runs:
        if run is not turn:
            assert run.meta.request["turns"][1][1] == turn.meta.output_text.strip()
            assert run.meta.question_tokens > 0


@pytest.mark.parametrize("options", [(), ASKED])
def test_a_cancelled_turn_is_the_run_that_the_command_names(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    pressed: list[bool] = []
    monkeypatch.setattr("kvlens.runs.stopping.stop_signals", lambda: lambda: bool(pressed))
    monkeypatch.setattr(
        Bar, "report", lambda self, phase, done, total: pressed.append(True) if (phase, done) == ("decode", 3) else None
    )
    assert run_command(folder, *options) == 1
    (run,) = stored(folder.parent / "runs")
    assert run.status == "cancelled"
    assert capsys.readouterr().out.split()[-1] == run.uid


def stored(folder: Path) -> list[Any]:
    return [kvlens.open(path.parent.name, runs=folder) for path in folder.glob("*/trace.duckdb")]


def test_replies_are_filled_in_order() -> None:
    heard: list[Any] = []

    def reply(turns: Any, text: str) -> str:
        heard.append((turns, text))
        return f" to {text} "

    assert fill_replies([("user", "a"), ("user", "b"), ("assistant", "B")], "c", reply) == (
        ("user", "a"),
        ("assistant", "to a"),
        ("user", "b"),
        ("assistant", "B"),
    )
    assert heard == [((), "a")]
    assert fill_replies((), "c", reply) == ()
    with raises_code("empty_reply", Refusal):
        fill_replies([("user", "a")], "c", lambda turns, text: " ")


def test_what_cannot_be_carried_is_refused() -> None:
    assert in_python("run with --turns anew.") == 'run with turns="anew".'
    with raises_code("unknown_turns", Refusal, given="maybe"):
        parse_turns("maybe")
    with raises_code("nothing_to_carry", Refusal, turns=1):
        first_reply([("assistant", "a")])
    with raises_code("nothing_to_carry", Refusal, turns=0):
        tokenize(PromptText("x y"), tokenizer(CHATML), None, 8, carried=True)
    with raises_code("reply_not_found", Refusal):
        tokenize(PromptText("x"), tokenizer(CHATML), None, 8, turns=[("user", "a"), ("assistant", " ")], carried=True)
