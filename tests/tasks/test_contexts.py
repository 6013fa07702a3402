"""Files whose questions stand apart from their context: RULER as kvpress stores it, SCBench; and what can be set behind
a path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from filetasks import ask, by_word, grade, write, write_parquet
from support import raises_code

from kvlens import tasks
from kvlens.lab.tasks import filerows
from kvlens.lab.tasks.scbench_metrics import bleu
from kvlens.tasks import Encoding

ROW = {
    "context": "Some numbers are hidden here. The number of oak is 7. The number of elm is 9.",
    "question": "Which numbers have oak and elm?",
    "answer_prefix": "The numbers are",
    "answer": ["7", "9"],
    "task": "niah_multiquery",
    "max_new_tokens": 128,
    "length": 4096,
}
QA = ROW | {"task": "qa_1", "answer": ["Oslo", "Kristiania"], "max_new_tokens": 32}
FIRST_TURN = "What is the value of aa?"
KV = {
    "id": 0,
    "context": '{"aa": "11", "bb": "22"}',
    "multi_turns": [{"input": FIRST_TURN, "answer": "11"}, {"input": "And bb?", "answer": "22"}],
}


def with_turns(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return KV | {"multi_turns": [{"input": "What is it?"} | turn for turn in turns]} | more


def test_ruler_rows(tmp_path: Path) -> None:
    spec = f"rulerkv:{write_parquet(tmp_path / 'test.parquet', ROW, QA)}"
    task, asked = tasks.get(spec), ask(spec)
    assert (task.items, task.generation(0).new_tokens, task.generation(1).new_tokens) == (2, 128, 32)
    assert asked.text == f"{ROW['context']}\n{ROW['question']} {ROW['answer_prefix']}"
    assert asked.question == len(ROW["context"])
    assert (grade(spec, "7"), grade(spec, " 7\n and 9.")) == (0.5, 1.0)
    assert grade(spec, "in kristiania", 1) == 1.0, "any of a question's answers"
    assert ask(f"{spec}@task=qa_1").answers == ("Oslo", "Kristiania")
    with raises_code("no_such_task", task="vt", tasks=["niah_multiquery", "qa_1"]):
        tasks.get(f"{spec}@task=vt")
    with raises_code("other_kind_of_file"):
        tasks.get(f"ruler:{tmp_path / 'test.parquet'}")


def test_the_prefix_begins_the_answer_in_the_chat_form(tmp_path: Path) -> None:
    spec = f"rulerkv:{write_parquet(tmp_path / 'test.parquet', ROW)}"
    chat = tasks.ask(tasks.get(spec), None, None, 0, Encoding(by_word, 4, chat=True))
    assert chat.opening == "The numbers are"
    assert chat.text.endswith(f"\n{ROW['question'].strip()}")
    plain = tasks.ask(tasks.get(spec), None, None, 0, Encoding(by_word))
    assert (plain.opening, plain.text.endswith("elm? The numbers are")) == ("", True)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"answer": []}, "row 2 of 'test.parquet' has a field 'answer' that is not a list of texts"),
        ({"answer": [""]}, "row 2 .* 'answer' that is not a list of texts"),
        ({"question": " "}, "row 2 .* has an empty context or question"),
        ({"context": None}, "row 2 .*: the field 'context' is not a text"),
        ({"max_new_tokens": 0}, "row 2 .* 'max_new_tokens' outside 1 to 4,096"),
    ],
)
def test_a_damaged_row_of_ruler_is_one_sentence(tmp_path: Path, bad: dict[str, Any], sentence: str) -> None:
    path = write_parquet(tmp_path / "test.parquet", ROW, ROW | bad)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"rulerkv:{path}")


def test_what_is_no_parquet_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1 and no more")
    with raises_code("not_parquet", file="test.parquet"):
        tasks.get(f"rulerkv:{path}")
    write_parquet(path, {name: value for name, value in ROW.items() if name != "task"})
    with raises_code("field_missing", row=1, field="task"):
        tasks.get(f"rulerkv:{path}")


def test_every_turn_is_a_prompt_on_the_same_context(tmp_path: Path) -> None:
    other = KV | {"context": "another", "multi_turns": KV["multi_turns"][:1]}
    spec = f"scbench:{write(tmp_path / 'scbench_kv.jsonl', KV, other)}"
    first, second, third = (ask(spec, index) for index in range(3))
    assert tasks.get(spec).items == 3
    assert first.text[: first.question] == second.text[: second.question] != third.text[: third.question]
    assert (first.text[first.question :], second.text[second.question :]) == (
        f"\n\n{FIRST_TURN}",
        f"\n\n{FIRST_TURN} 11\n\nAnd bb?",
    )
    assert third.text[third.question :] == f"\n\n{FIRST_TURN}", "another context, another conversation"
    alone = ask(f"{spec}@turns=alone", 1)
    assert (alone.text, alone.question) == (first.text[: first.question] + "\n\nAnd bb?", first.question)
    assert (grade(spec, "it is 11."), grade(spec, "11", 1), grade(spec, "x22x", 1)) == (1.0, 0.0, 1.0)
    with raises_code("no_such_prompt", prompts=3, index=3):
        ask(spec, 3)


def test_a_cut_context_is_the_same_for_all_of_its_questions(tmp_path: Path) -> None:
    words = " ".join(f"w{at}" for at in range(300))
    turns = [{"input": "Short?", "answer": "1"}, {"input": "A question " + "of many words " * 9, "answer": "2"}]
    spec = f"scbench:{write(tmp_path / 'scbench_prefix_suffix.jsonl', KV | {'context': words, 'multi_turns': turns})}"
    first, second = (ask(spec, index, 100) for index in range(2))
    assert first.text[: first.question] == second.text[: second.question]
    assert first.text.startswith("w0 w1 ")
    assert len(by_word(second.text)) in (98, 99)
    alone = ask(f"{spec}@turns=alone", 1, 100)
    assert second.question < alone.question, "room for the turn before it"
    with raises_code("too_short", tokens=20, index=0):
        ask(spec, 0, 20)


@pytest.mark.parametrize(
    ("task", "turn", "said"),
    [
        ("kv", {"input": "The value of aa is: ", "answer": "11"}, "\n\nThe value of aa is: 11"),
        ("vt", {"answer": ["AB", "CD"]}, "\n\nWhat is it? AB, CD"),
        ("mf", {"answer": 17}, "\n\nWhat is it? 17"),
        ("qa_eng", {"answer": "elm"}, "\n\nQuestion: What is it?\nAnswer: elm"),
        (
            "choice_eng",
            {"answer": "elm", "options": ["oak", "elm", "fir", "ash"]},
            "\n\nQuestion: What is it?\nA. oak\nB. elm\nC. fir\nD. ash\nAnswer: B. elm",
        ),
        ("repoqa", {"name": "f", "answer": "def f():\n    pass"}, "\n\nWhat is it?\ndef f():\n    pass"),
    ],
)
def test_an_earlier_turn_is_its_question_and_its_reference_answer(
    tmp_path: Path, task: str, turn: dict[str, Any], said: str
) -> None:
    spec = f"scbench:{write(tmp_path / f'scbench_{task}.jsonl', with_turns(turn, turn, repo='r'))}"
    first, second = (ask(spec, index) for index in range(2))
    context, asked = first.text[: first.question], first.text[first.question :]
    assert second.text == context + said + asked
    assert (second.question, second.answers) == (first.question, first.answers)
    chat = tasks.ask(tasks.get(spec), None, None, 0, Encoding(by_word, 4, chat=True), 1)
    assert chat.text == context + said + asked.removesuffix(chat.cue), "only the last answer is begun by the model"


CODE = "def add(a, b):\n    total = a + b\n    return total\n"
OTHER = "def cut(text, at):\n    left = text[:at]\n    return left\n"


@pytest.mark.parametrize(
    ("task", "turn", "outputs"),
    [
        ("passkey", {"answer": "4071"}, {"key 4071, not 5": 1.0, "5 then 4071": 0.0}),
        ("mf", {"answer": 17}, {"17.9 it is": 1.0, "about 18": 0.0, "none": 0.0}),
        ("mf", {"answer": 2.5}, {"2.50": 1.0, "2": 0.0}),
        ("vt", {"answer": ["AB", "CD", "EF"]}, {"ab, cd": 0.67, "": 0.0}),
        ("many_shot", {"answer": "(B)"}, {"so (b)": 1.0, "(A)": 0.0}),
        ("qa_eng", {"answer": "New York"}, {"in NEW YORK": 1.0, "York": 0.0}),
        ("qa_chn", {"answer": ["北京"]}, {"北京市。": 0.8, "上海": 0.0}),
        ("choice_eng", {"answer": "elm", "options": ["oak", "elm", "fir", "ash"]}, {"B": 1.0, "elm": 1.0, "A": 0.0}),
        ("summary", {"answer": "the cat sat"}, {"The cat sat": 1.0, "dogs": 0.0}),
        ("kv_compressible", {"answer": "a-b"}, {"xa-bx": 1.0, "a b": 0.0}),
    ],
)
def test_each_task_has_its_own_metric(
    tmp_path: Path, task: str, turn: dict[str, Any], outputs: dict[str, float]
) -> None:
    spec = f"scbench:{write(tmp_path / f'scbench_{task}.jsonl', with_turns(turn))}"
    assert {output: pytest.approx(grade(spec, output)) for output in outputs} == outputs


def test_a_function_is_found_when_it_is_the_most_similar_and_similar_enough(tmp_path: Path) -> None:
    turns = ({"name": "add", "answer": CODE}, {"name": "cut", "answer": OTHER})
    spec = f"scbench:{write(tmp_path / 'scbench_repoqa.jsonl', with_turns(*turns, repo='r', lang='python'))}"
    assert grade(spec, f"Here it is:\n```python\n{CODE}```\nDone.") == grade(spec, CODE) == 1.0
    assert grade(spec, OTHER) == grade(spec, "def add(x): pass") == grade(spec, "") == 0.0
    assert grade(spec, OTHER, 1) == 1.0
    assert tasks.get(spec).generation(0).new_tokens == 1024


def test_bleu() -> None:
    # given a b c d e, wanted a b c x e: 4/5, 2/4 (ab, bc), 1/3 (abc), no four: ln 5 / (2 * 5) of 2
    wanted = math.exp((math.log(4 / 5) + math.log(2 / 4) + math.log(1 / 3) + math.log(math.log(5) / 10 / 2)) / 4)
    assert bleu(list("abcxe"), list("abcde")) == pytest.approx(wanted)
    # shorter than what is wanted: exp(1 - 6/4)
    assert bleu(list("abcdef"), list("abcd")) == pytest.approx(math.exp(-0.5))
    assert bleu(["a"], ["b"]) == bleu(["a"], []) == 0.0


def test_a_file_of_two_tasks_goes_by_its_turns(tmp_path: Path) -> None:
    turns = ({"task": "scbench_summary", "answer": "the cat sat"}, {"task": "scbench_passkey", "answer": "4071"})
    spec = f"scbench:{write(tmp_path / 'scbench_summary_with_needles.jsonl', with_turns(*turns))}"
    assert [tasks.get(spec).generation(index).new_tokens for index in range(2)] == [800, 15]
    assert (grade(spec, "the cat sat"), grade(spec, "4071", 1), grade(spec, "the cat", 1)) == (1.0, 1.0, 0.0)
    assert tasks.get(spec).metric.endswith(" each turn")


def test_scbench_in_parquet_is_known_by_its_folder(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "scbench_kv" / "test-00000-of-00001.parquet", KV)
    assert grade(f"scbench:{path}", "22", 1) == 1.0


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        ("other", KV, "the name of 'other.jsonl' is none of SCBench's tasks: scbench_choice_eng, "),
        ("scbench_kv", KV | {"context": None}, "line 1 .* lacks the field 'context'"),
        ("scbench_kv", KV | {"multi_turns": []}, "line 1 .* empty list 'multi_turns'"),
        ("scbench_kv", KV | {"multi_turns": "x"}, "line 1 .*: the field 'multi_turns' is not a list"),
        ("scbench_kv", KV | {"multi_turns": ["x"]}, "line 1 .* has a turn 1 that lacks the field 'input'"),
        ("scbench_kv", with_turns({"answer": "1"}, {}), "line 1 .* has a turn 2 that lacks the field 'answer'"),
        ("scbench_choice_eng", with_turns({"answer": "1"}), "turn 1 that lacks the field 'options' with its four"),
        (
            "scbench_choice_eng",
            with_turns({"answer": "1", "options": ["2", "3", "4", "5"]}),
            "turn 1 that has an answer that is none of its options",
        ),
        ("scbench_mf", with_turns({"answer": "many"}), "turn 1 that has an answer that is not a number"),
        ("scbench_repoqa", with_turns({"answer": CODE}, repo="r"), "turn 1 that lacks the field 'name'"),
        ("scbench_repoqa", with_turns({"answer": CODE, "name": "add"}), "line 1 .* lacks the field 'repo'"),
        (
            "scbench_repoqa_and_kv",
            with_turns({"answer": CODE}),
            "turn 1 that lacks a field 'task' that is one of scbench_repoqa, scbench_kv",
        ),
    ],
)
def test_a_damaged_line_of_scbench_is_one_sentence(
    tmp_path: Path, file: str, line: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"scbench:{write(tmp_path / f'{file}.jsonl', line)}")


def test_parameters_behind_the_path(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a@b.parquet", ROW)
    assert tasks.get(f"rulerkv:{path}").items == 1, "an @ of the path is the path's"
    odd = write(tmp_path / "scbench_kv@task=vt", {"input": "x", "outputs": ["7"]})
    with raises_code("task_unknown"):
        tasks.get(f"scbench:{odd}")  # a file whose name looks like one
    for wrong, sentence in {
        "@shots=3": "files of rulerkv have no parameter 'shots'; it has task.",
        "@task=a@task=b": "the parameter 'task' is set twice",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            tasks.get(f"rulerkv:{path}{wrong}")
    kv = write(tmp_path / "scbench_kv.jsonl", KV)
    with raises_code("not_a_choice", parameter="turns", choices=("earlier", "alone")):
        tasks.get(f"scbench:{kv}@turns=all")
    plain = write(tmp_path / "hotpotqa.jsonl", {"input": "x"})
    with raises_code("unknown_parameter", parameter="n", known=()):
        tasks.get(f"longbench:{plain}@n=1")


def test_a_parquet_file_that_announces_more_than_may_be_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that repeats takes kilobytes on disk; its metadata say what it unpacks to, and nothing is unpacked."""
    path = write_parquet(tmp_path / "bomb.parquet", ROW | {"context": "a" * 4_000_000})
    assert path.stat().st_size < 400_000
    monkeypatch.setattr(filerows, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(filerows, "_bounded_rows", lambda *_: pytest.fail("rows were unpacked"))
    with pytest.raises(ValueError, match="too_large"):
        filerows.read_rows(path, {})


def test_one_stored_value_of_many_rows_is_unpacked_by_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "bomb.parquet", *[ROW | {"context": "a" * 1_000_000}] * 40)
    monkeypatch.setattr(filerows, "MOST_BYTES", 8_000_000)
    monkeypatch.setattr(filerows, "LARGE_BATCH", 1_000_000)
    sizes: list[int] = []
    bounded_rows = filerows._bounded_rows

    def watched(path: Path, batches: Any) -> Any:
        return bounded_rows(path, (sizes.append(len(batch)) or batch for batch in batches))

    monkeypatch.setattr(filerows, "_bounded_rows", watched)
    with pytest.raises(ValueError, match="too_large"):
        filerows.read_rows(path, {})
    assert set(sizes) == {1}
    assert len(sizes) <= 9
