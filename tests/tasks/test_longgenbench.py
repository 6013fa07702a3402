"""The two benchmarks named LongGenBench, which are told apart by their authors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filetasks import ask, grade, write
from support import raises_code

from kvlens import tasks
from kvlens.lab.tasks.longgenbench_liu import split_answers

DIARY = {
    "prompt": "Write a diary of 4 weeks. *** started ***\n#*# Week 1 (January):",
    "checks_once": {"2": "a birthday"},
    "checks_range": {},
    "checks_periodic": {"3": "a walk"},
    "type": "Week",
    "prefix": "#*# Week 1 (January):",
    "number": 4,
}


def entries(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def sums(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n} and {n}?", "answer": f"Add them.\n#### {2 * n}"} for n in numbers]


def test_neither_is_called_longgenbench_alone(tmp_path: Path) -> None:
    assert "longgenbench" not in tasks.file_kinds()
    with pytest.raises(tasks.UnknownTask, match=r"unknown task .* longgenbench-wu:PATH, longgenbench-liu:PATH"):
        tasks.get(f"longgenbench:{tmp_path}")


def test_wu_scores_the_sections_that_were_written(tmp_path: Path) -> None:
    spec = f"longgenbench-wu:{entries(tmp_path / 'Dataset_short.json', DIARY)}@tokens=500"
    asked, task = ask(spec), tasks.get(spec)
    assert (asked.text, asked.answer, task.new_tokens) == (DIARY["prompt"], " Week 1 to 4", 500)
    for output, share in {
        " Snow.\n#*# Week 2 (January): Rain.\n#*# Week 3: Sun.\n#*# Week 4: Wind.\n*** finished ***": 1.0,
        " Snow.\n#*# Week 3: Sun.": 0.5,
        " Snow.\n*** finished ***\n#*# Week 2: Rain.": 0.25,
        " Snow.\n#*# Week 2: a\n#*# Week 2: b\n#*# Week 9: c\n#*# Day 3: d": 0.5,
        " \n": 0.0,
    }.items():
        assert grade(spec, output) == share, output
    assert tasks.score(spec, " Week 1 to 4", "#*# Week 2: Rain. #*# Week 4: Wind.") == 0.5
    assert "STIC, need another model: not scored" in task.metric
    assert tasks.get(f"longgenbench-wu:{tmp_path / 'Dataset_short.json'}").new_tokens == 16_000


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"number": 0}, "entry 2 of 'Dataset.json' has a field 'number' outside 1 to 10,000"),
        ({"number": "4"}, "entry 2 .*: the field 'number' is not a number"),
        ({"type": " "}, "entry 2 .* has an empty field 'type'"),
        ({"checks_once": []}, "entry 2 .*: the field 'checks_once' is not an object"),
    ],
)
def test_a_damaged_entry_is_one_sentence(tmp_path: Path, bad: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"longgenbench-wu:{entries(tmp_path / 'Dataset.json', DIARY, DIARY | bad)}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "'Dataset.json' is not JSON"),
        (b'{"a": 1}', "not a JSON array"),
        (b"[1]", "entry 1 of 'Dataset.json' is not a JSON object"),
        (b"[]", "holds no prompts"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_array_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "Dataset.json").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"longgenbench-wu:{tmp_path / 'Dataset.json'}")
    with pytest.raises(ValueError, match="'tokens' lies between 1"):
        tasks.get(f"longgenbench-wu:{tmp_path / 'Dataset.json'}@tokens=0")


def test_liu_asks_several_questions_at_once(tmp_path: Path) -> None:
    spec = f"longgenbench-liu:{write(tmp_path / 'test.jsonl', *sums(1, 2, 3, 4, 500))}@questions=2@shots=1"
    task, asked = tasks.get(spec), ask(spec, 1)
    assert (task.items, task.new_tokens, asked.answer) == (2, 4096, " 6, 8")
    assert "Question_1:\nWhat is 500 and 500?\n\nAnswer_1:\nAdd them.\nThe answer is 1000." in asked.text
    assert asked.text[asked.question :] == (
        "\n\nFollowing questions:\nQuestion_2:\nWhat is 3 and 3?\n\nQuestion_3:\nWhat is 4 and 4?\n\n"
    )
    right = "Answer_2:\nThree and three.\nThe answer is 6.\n\nAnswer_3:\nThe answer is $8.\n\n"
    assert grade(spec, right, 1) == tasks.score(spec, " 6, 8", right) == 1.0
    assert grade(spec, "Answer_2:\nThe answer is 6, not 7.", 1) == 0.0, "the last number"
    assert grade(spec, "Answer_2:\nThe answer is 6.", 1) == 0.5, "what is not answered is wrong"
    assert grade(spec, "6 and 8", 1) == grade(spec, "", 1) == 0.0
    with raises_code("no_such_prompt", prompts=2, index=2):
        ask(spec, 2)


def test_liu_takes_the_repositorys_own_examples_where_they_lie_beside(tmp_path: Path) -> None:
    own = "Question_1: \nOne?\n\nQuestion_2: \nTwo?\n\nAnswer_1:\nThe answer is 1.\n\nAnswer_2:\nThe answer is 2."
    (tmp_path / "LongGenBench_prompt.txt").write_text(own)
    spec = f"longgenbench-liu:{write(tmp_path / 'test.jsonl', *sums(1, 2))}@questions=2"
    assert f"Examples:\n{own}\n\nFollowing questions:\nQuestion_3:\nWhat is 1" in ask(spec).text
    (tmp_path / "LongGenBench_prompt.txt").write_text("Other words.")
    with pytest.raises(ValueError, match=r"'LongGenBench_prompt.txt' beside 'test.jsonl' holds no 'Question_1:'"):
        tasks.get(f"{spec}@shots=1")


def test_liu_of_choices(tmp_path: Path) -> None:
    path = tmp_path / "anatomy_test.csv"
    path.write_text('"Which, of these?",oak,elm,fir,ash,C\nAnd now?,1,2,3,4,A\nOr?,5,6,7,8,D\n')
    spec = f"longgenbench-liu:{path}@questions=2@shots=1"
    asked = ask(spec)
    assert asked.answer == " C, A"
    assert "Question_2:\nWhich, of these?\n(A) oak (B) elm (C) fir (D) ash\n\nQuestion_3:" in asked.text
    assert "Answer_1:\nThe answer is D." in asked.text
    assert grade(spec, "Answer_2:\nNot B but (C).\n\nAnswer_3:\nThe answer is B.") == 0.5


def test_how_an_output_is_cut_into_answers() -> None:
    assert split_answers("Answer_9:\none\ntwo.\n\nAnswer_10:\nthree") == ["one\ntwo.", "three"]
    assert split_answers("no form at all") == []


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", "Which?,1,2,3,A\n", "row 1 of 'a.csv' has 5 columns, not question, four choices, letter"),
        ("a.csv", "Which?,1,2,3,4,E\n", "row 1 of 'a.csv' has the answer 'E', which is none of A, B, C, D"),
        ("a.csv", ' ,1,2,3,4,"A"\n', "row 1 .* has an empty question"),
        ("a.csv", "\n", "holds no prompts"),
        ("a.jsonl", '{"question": "Which?", "answer": "2"}\n', "line 1 .* does not end with #### and a number"),
        ("a.jsonl", '{"question": " ", "answer": "#### 2"}\n', "line 1 .* has an empty question"),
        (
            "a.jsonl",
            '{"question": "Which?", "answer": "#### 2"}\n' * 4,
            r"'a.jsonl' has 4 rows, too few for 4 questions and 8 worked examples: set @questions and @shots\.",
        ),
    ],
)
def test_a_damaged_file_of_liu_is_one_sentence(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"longgenbench-liu:{tmp_path / name}")
    with raises_code("parameter_out_of_range", parameter="questions", value=1):
        tasks.get(f"longgenbench-liu:{tmp_path / name}@questions=1")
