"""Forms in which benchmarks are published: as kvpress stores them, by HELMET's names, packed by gzip."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from filetasks import ask, grade, write, write_parquet
from support import raises_code

from kvlens import tasks

LONG = {
    "context": "Read the passages.\n\nPassage 1:\nAnna Berg wrote the report.\n\n",
    "question": "Who wrote the report?\n",
    "answer_prefix": "Answer: ",
    "answers": ["Anna Berg", "A. Berg"],
    "task": "hotpotqa",
    "max_new_tokens": 32,
    "length": 12,
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
TREC = LONG | {"task": "trec-e", "answers": ["Food"], "all_classes": ["Food", "Sport"], "max_new_tokens": 64}
KEY = {
    "context": "Find the hidden fact.\n\nThe pass key is 4071.\n\n",
    "question": "What is the pass key?",
    "answer_prefix": "The pass key is:",
    "answer": ["4071"],
    "task": "passkey",
    "max_new_tokens": 26,
}
CHOICE = KEY | {
    "question": "Which door?\n\nGive one letter.\nA. red\nB. blue\nC. green\nD. none",
    "answer_prefix": "The letter of the correct answer is",
    "answer": ["B"],
    "task": "longbook_choice_eng",
    "max_new_tokens": 60,
}
NEEDLE = {
    "context": "One of the special magic numbers for tall-tree is: 4071.",
    "query": "tall-tree",
    "type_needle_v": "number",
    "answer": ["4071"],
}


def test_longbench_as_kvpress_stores_it(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test.parquet", LONG, TREC)
    spec = f"longbenchkv:{path}"
    assert (tasks.get(spec).items, tasks.get(spec).new_tokens) == (2, 64)
    asked = ask(spec)
    assert asked.text == LONG["context"] + LONG["question"] + LONG["answer_prefix"]
    assert (asked.answers, asked.opening) == (("Anna Berg", "A. Berg"), "Answer:")
    assert grade(spec, "Anna Berg") == 1.0
    assert grade(spec, "Food\nSport", 1) == 1.0, "only the first line of trec counts"
    assert grade(spec, "Food, Sport", 1) == 0.5
    assert tasks.get(f"{spec}@task=trec-e").items == 1
    assert [tasks.get(spec).generation(index).new_tokens for index in (0, 1)] == [32, 64]
    with pytest.raises(ValueError, match=r"name it longbenchkv:"):
        tasks.get(f"longbench:{path}")


def test_infinitebench_as_kvpress_stores_it(tmp_path: Path) -> None:
    calculation = KEY | {"task": "math_calc", "answer": ["1", "4", "8"], "max_new_tokens": 30020}
    path = write_parquet(tmp_path / "test.parquet", KEY, CHOICE, calculation)
    spec = f"infinitebenchkv:{path}"
    assert ask(spec).text == KEY["context"] + KEY["question"] + " " + KEY["answer_prefix"]
    assert (grade(spec, " 4071."), grade(spec, "4072")) == (1.0, 0.0)
    assert ask(spec, 1).answers == ("blue", "B"), "the options end the question"
    assert (grade(spec, "B", 1), grade(spec, "C", 1)) == (1.0, 0.0)
    assert grade(spec, "1, 4, 9", 2) == pytest.approx(2 / 3)
    assert tasks.get(spec).generation(2).new_tokens == 4096
    with pytest.raises(ValueError, match=r"name it infinitebenchkv:"):
        tasks.get(f"infinitebench:{write_parquet(tmp_path / 'passkey.parquet', KEY)}")


@pytest.mark.parametrize(
    ("kind", "row", "change", "problem"),
    [
        ("longbenchkv", LONG, {"task": "other"}, "has the task 'other', which LongBench does not have"),
        ("longbenchkv", TREC, {"all_classes": None}, "lacks the field 'all_classes'"),
        ("longbenchkv", LONG, {"answers": []}, "has a field 'answers' that is not a list of texts"),
        ("infinitebenchkv", KEY, {"task": "other"}, "has the task 'other', which InfiniteBench does not have"),
        ("infinitebenchkv", CHOICE, {"answer": ["E"]}, "has an answer that is no letter from A to D"),
        ("infinitebenchkv", CHOICE, {"question": "Which?"}, "does not end in the options A to D"),
        ("infinitebenchkv", KEY, {"max_new_tokens": 0}, "'max_new_tokens' outside 1 to 4,096"),
        ("infinitebenchkv", KEY, {"context": " "}, "has an empty context"),
    ],
)
def test_a_mistaken_row_is_named_by_its_number(
    kind: str, row: dict[str, Any], change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", row, row | change)
    with pytest.raises(ValueError, match=rf"line 2 of 'rows.jsonl'.*{problem}"):
        tasks.get(f"{kind}:{path}")


def test_ruler_by_helmets_names(tmp_path: Path) -> None:
    path = write(tmp_path / "niah_multikey_2" / "validation_131072.jsonl", NEEDLE, NEEDLE | {"input": "As it stands:"})
    spec = f"ruler:{path}"
    asked = ask(spec)
    assert asked.text.startswith(NEEDLE["context"])
    assert NEEDLE["context"] in asked.text
    assert "tall-tree?" in asked.text
    assert (asked.answers, asked.question) == (("4071",), len(NEEDLE["context"]))
    assert ask(spec, 1).text == "As it stands:"
    assert (tasks.get(spec).new_tokens, grade(spec, "it is 4071")) == (128, 1.0)
    qa = {"context": "Documents.", "question": "Who?", "outputs": ["Anna", "A. Berg"]}
    spec = f"ruler:{write(tmp_path / 'qa_1' / 'validation_8192.jsonl', qa)}"
    assert ask(spec).text.endswith("Question: Who?\nAnswer:")
    assert grade(spec, "Anna") == 1.0, "one of the answers is enough"
    example = {"context": "VAR A = 1", "query": "1", "example": "An example.", "answer": ["A"]}
    spec = f"ruler:{write(tmp_path / 'vt' / 'validation_4096.jsonl', example)}"
    assert ask(spec).text.startswith("An example.\n\nVAR A = 1\n\n")
    assert " 1" in ask(spec).text.rpartition("\n\n")[2]
    for row, problem in (
        ({"answer": ["x"]}, "lacks the field 'input'"),
        ({"context": "x"}, "lacks the field 'outputs'"),
    ):
        with pytest.raises(ValueError, match=rf"line 2 of 'validation_4096.jsonl' {problem}"):
            tasks.get(f"ruler:{write(tmp_path / 'fwe' / 'validation_4096.jsonl', NEEDLE, row)}")


@pytest.mark.parametrize("kind", ["ruler", "infinitebench", "longbench"])
def test_files_packed_by_gzip(kind: str, tmp_path: Path) -> None:
    """With a byte order mark and Windows line ends, as any text file may have."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "ruler": ("qa_1", {"input": "A text.", "outputs": ["7"]}),
        "infinitebench": ("passkey", {"context": "4071", "input": "?", "answer": "7"}),
        "longbench": ("hotpotqa", {"context": "c", "input": "?", "answers": ["7"], "dataset": "hotpotqa"}),
    }
    name, row = rows[kind]
    path = tmp_path / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(("\ufeff" + json.dumps(row) + "\r\n" + json.dumps(row) + "\r\n").encode()))
    plain = write(tmp_path / f"{name}.jsonl", row, row)
    spec = f"{kind}:{path}"
    assert tasks.get(spec).items == 2
    assert ask(spec, 1).text == ask(f"{kind}:{plain}", 1).text
    assert grade(spec, "7", 1) == 1.0
    path.write_bytes(gzip.compress((json.dumps(row) + "\nnot JSON\n").encode()))
    with pytest.raises(ValueError, match=rf"line 2 of '{name}.jsonl.gz' is not JSON"):
        tasks._load(tasks.file_kinds()[kind])(path)
    path.write_bytes(path.read_bytes()[:-9])
    with raises_code("not_gzip", file=f"{name}.jsonl.gz"):
        tasks._load(tasks.file_kinds()[kind])(path)
