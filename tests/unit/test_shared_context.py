"""Prompts of a file that begin with the same tokens: read once, with the same figures as when each is read by itself;
samples of one problem, each drawn with its own seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlens import tasks
from kvlens.app.ui.common.submit import submit_trial
from kvlens.demo import demo_path
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.lab.bench.sweep import SweepRequest, sweep
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import carry_out
from kvlens.lab.training.demo.tokenizer import load_tokenizer
from kvlens.store.reader import TraceReader
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import tokenize


class Counting(Engine):
    """An engine that counts the prompts it reads."""

    def __init__(self, loaded: Any) -> None:
        super().__init__(loaded)
        self.readings = 0

    def read(self, *given: Any, **named: Any) -> Any:
        self.readings += 1
        return super().read(*given, **named)


@pytest.fixture
def engine() -> Counting:
    return Counting(load("demo"))


def trial(task: str, index: int, question: str = "in") -> Trial:
    return Trial(task, None, None, 0, index, "streaming_llm", "50%", question)


def test_the_context_of_several_questions_is_read_once(tmp_path: Path, engine: Counting) -> None:
    turns = [{"input": f"What is the value of key {n}?", "answer": str(n)} for n in range(3)]
    line = {"context": "The value of every key is its number. " * 20, "multi_turns": turns}
    path = tmp_path / "scbench_mf.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"context": "Another. " * 40}) + "\n")
    prompts = Prompts(engine)
    rows = [carry_out(engine, prompts, trial(f"scbench:{path}", index, "after")) for index in range(6)]
    assert engine.readings == 2, "one per context"
    first, second, third = (row["prompt_tokens"] for row in rows[:3])
    assert second - first == third - second > 0, "a turn more, question and answer, is fed behind it"
    given = [carry_out(engine, prompts, trial(f"scbench:{path}@turns=alone", at, "after")) for at in range(3)]
    assert {row["prompt_tokens"] for row in given} == {first}
    assert engine.readings == 3, "the second context was the last one read"
    alone = [carry_out(engine, Prompts(engine), trial(f"scbench:{path}", index, "after")) for index in range(6)]
    assert engine.readings == 9
    assert rows == alone
    carry_out(engine, prompts, trial(f"scbench:{path}", 0))
    carry_out(engine, prompts, trial(f"scbench:{path}", 1))
    assert engine.readings == 11, "a question that is read with its context is another prompt"


@pytest.mark.parametrize("chat", ["on", "off"])
def test_earlier_turns_are_fed_behind_the_same_context_in_either_form(tmp_path: Path, chat: str) -> None:
    turns = [{"input": "The value of aa is: ", "answer": "4071"}, {"input": "The value of bb is: ", "answer": "9"}]
    path = tmp_path / "scbench_kv.jsonl"
    path.write_text(json.dumps({"context": '{"aa": "4071", "bb": "9"}', "multi_turns": turns}) + "\n")
    tokenizer, prompts = load_tokenizer(demo_path()), []
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}<a>"
    for index in range(2):
        task = tasks.get(f"scbench:{path}")
        source = tasks.prompt_of(tasks.ask(task, None, None, 0, encoding_of(tokenizer, chat), index))
        prompts.append(tokenize(source, tokenizer, 4096, 8, chat, question="after"))
        said = "".join(source.text[a:b] for a, b in filter(None, prompts[-1].offsets))
        assert said == source.text[: source.question], "every character of the context, '4071' too, keeps its place"
    first, second = prompts
    assert first.ids == second.ids
    fed = tokenizer.decode(second.asked)
    assert fed.lstrip().startswith(f"{turns[0]['input']}4071\n\n{turns[1]['input']}")
    assert fed.endswith("</u><a>") == (chat == "on")


def test_samples_of_a_problem_are_drawn_with_their_seeds(tmp_path: Path, engine: Counting) -> None:
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"problem": "How much is it? " * 20, "answer": 7}) + "\n")
    prompts, task = Prompts(engine), f"aime24:{path}@samples=3@tokens=24"
    rows = [carry_out(engine, prompts, trial(task, index)) for index in range(3)]
    assert engine.readings == 1
    assert len({row["output"] for row in rows}) > 1
    assert carry_out(engine, Prompts(engine), trial(task, 2))["output"] == rows[2]["output"]
    greedy = [carry_out(engine, prompts, trial(f"aime24:{path}@tokens=24", 0))["output"] for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_the_app_runs_no_trial_that_was_drawn_as_if_it_were_greedy(tmp_path: Path) -> None:
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"problem": "How much is it?", "answer": 7}) + "\n")
    made = {"task": f"aime24:{path}@samples=2", "length": None, "depth": None, "seed": 0, "index": 1, "method": "h2o"}
    with pytest.raises(ValueError, match=r"temperature 0\.6, top-p 0\.95, seed 1\)"):
        submit_trial(made | {"budget": ""})


def test_a_stored_sample_says_how_it_was_drawn(tmp_path: Path) -> None:
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"problem": "How much is it? " * 20, "answer": 7}) + "\n")
    request = SweepRequest(
        model="demo", methods=("full", "streaming_llm"), tasks=(f"aime24:{path}@samples=2@tokens=8",), budgets=("50%",)
    )
    _, rows = sweep(request, tmp_path, lambda *told: None)
    assert len(rows) == 6
    for row in rows:
        with TraceReader.open(tmp_path, row["uid"]) as reader:
            meta = reader.meta
            assert (meta.temperature, meta.top_p, reader.n_steps <= 8) == (0.6, 0.95, True)
            assert meta.seed == row["index"]


def test_a_sweep_reads_the_context_of_several_questions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"input": f"What is the value of key {n}?", "answer": str(n)} for n in range(3)]
    path = tmp_path / "scbench_mf.jsonl"
    path.write_text(json.dumps({"context": "The value of every key is its number. " * 20, "multi_turns": turns}) + "\n")
    monkeypatch.setattr("kvlens.engine.engine.Engine", Counting)
    readings: list[int] = []

    def read(self: Engine, *given: Any, **named: Any) -> Any:
        readings.append(1)
        return Engine.read(self, *given, **named)

    monkeypatch.setattr(Counting, "read", read)
    request = SweepRequest(
        model="demo",
        methods=("streaming_llm",),
        tasks=(f"scbench:{path}",),
        budgets=("50%",),
        question="after",
        traces=False,
    )
    _, rows = sweep(request, tmp_path, lambda *told: None)
    assert len(rows) == 3
    assert len(readings) == 1
