"""Files of published benchmarks: small ones made here in the published formats, whole and damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from filetasks import ask, by_word, write
from support import raises_code

from kvlens import tasks
from kvlens.lab.tasks.filetask import cut_middle
from kvlens.tasks import Encoding

LONGBENCH = {
    "input": "Who wrote it?",
    "context": "Passage 1:\nAnna Berg wrote the {report} in May.",
    "answers": ["Anna Berg", "A. Berg"],
    "length": 12,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
CHOICES = {
    "_id": "b1",
    "domain": "Single-Document QA",
    "sub_domain": "Legal",
    "difficulty": "easy",
    "length": "short",
    "question": "Which door?",
    "choice_A": "red",
    "choice_B": "blue",
    "choice_C": "green",
    "choice_D": "none",
    "answer": "C",
    "context": "They went through the green door.",
}
RULER = {"index": 0, "input": "Numbers are hidden here. 7 and 9.", "outputs": ["7", "9"], "length": 9}
INFINITE = {
    "id": 0,
    "context": "A long text. The pass key is 4071.",
    "input": "What is the pass key?",
    "answer": ["4071"],
    "options": [],
}


def test_longbench(tmp_path: Path) -> None:
    spec = f"longbench:{write(tmp_path / 'hotpotqa.jsonl', LONGBENCH, LONGBENCH | {'answers': ['Oslo']})}"
    task = tasks.get(spec)
    assert (task.items, task.new_tokens, task.name, task.placed) == (2, 32, spec, False)
    asked = ask(spec)
    assert LONGBENCH["context"] in asked.text
    assert "Who wrote it?" in asked.text
    assert (asked.length, asked.depth, asked.answers) == (None, None, ("Anna Berg", "A. Berg"))
    assert task.grade(asked, "It was Berg, A.") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1)), (
        "the best answer counts: 'berg' of 3 words"
    )
    assert task.grade(ask(spec, 1), "Oslo") == 1.0
    assert tasks.remake({"task": spec, "length": None, "depth": None, "seed": 0, "index": 1}, Encoding(by_word)) == ask(
        spec, 1
    )


def test_longbench_uses_the_official_prompts_where_they_lie_beside(tmp_path: Path) -> None:
    path = write(tmp_path / "data" / "hotpotqa_e.jsonl", LONGBENCH | {"dataset": "hotpotqa_e"})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "<{context}> Q: {input} A:"}))
    assert ask(f"longbench:{path}").text == f"<{LONGBENCH['context']}> Q: Who wrote it? A:"


def test_longbench_classes_first_lines_and_code(tmp_path: Path) -> None:
    trec = LONGBENCH | {"dataset": "trec", "answers": ["Food"], "all_classes": ["Food", "Sport"]}
    spec = f"longbench:{write(tmp_path / 'trec.jsonl', trec)}"
    assert tasks.get(spec).grade(ask(spec), "\nFood\nSport") == 1.0, "only the first line counts"
    assert tasks.get(spec).grade(ask(spec), "Food, Sport") == 0.5
    code = LONGBENCH | {"dataset": "lcc", "answers": ["x = 1"], "context": "def f():\n", "input": ""}
    spec = f"longbench:{write(tmp_path / 'lcc.jsonl', code)}"
    assert tasks.get(spec).grade(ask(spec), "x = 1\ny = 2") == 1.0


def test_longbench_in_chinese_says_what_is_missing_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with raises_code("package_missing", package="jieba"):
        tasks.get(f"longbench:{write(tmp_path / 'vcsum.jsonl', LONGBENCH | {'dataset': 'vcsum'})}")


def test_longbench2(tmp_path: Path) -> None:
    spec = f"longbench2:{write(tmp_path / 'data.jsonl', CHOICES)}"
    task, asked = tasks.get(spec), ask(spec)
    assert "(C) green" in asked.text
    assert task.grade(asked, "The correct answer is (C)") == 1.0
    assert task.grade(asked, "green") == task.grade(asked, "The correct answer is (A)") == 0.0


def test_ruler(tmp_path: Path) -> None:
    niah = f"ruler:{write(tmp_path / 'niah_multivalue' / 'validation.jsonl', RULER)}"
    assert (tasks.get(niah).new_tokens, tasks.get(niah).grade(ask(niah), "the 7")) == (128, 0.5)
    qa = f"ruler:{write(tmp_path / 'qa_1.jsonl', RULER | {'answer_prefix': ' Answer:'})}"
    assert ask(qa).text.endswith("7 and 9. Answer:")
    assert tasks.get(qa).grade(ask(qa), "the 7") == 1.0
    with raises_code("task_unknown", name="other"):
        tasks.get(f"ruler:{write(tmp_path / 'other.jsonl', RULER)}")


def test_infinitebench(tmp_path: Path) -> None:
    key = f"infinitebench:{write(tmp_path / 'passkey.jsonl', INFINITE)}"
    assert (tasks.get(key).new_tokens, tasks.get(key).grade(ask(key), " 4071.")) == (6, 1.0)
    book = INFINITE | {"answer": ["blue"], "options": ["red", "blue", "green", "none"]}
    choice = f"infinitebench:{write(tmp_path / 'longbook_choice_eng.jsonl', book)}"
    assert ask(choice).answers == ("blue", "B")
    assert "B. blue" in ask(choice).text
    assert tasks.get(choice).grade(ask(choice), "B") == 1.0
    call = INFINITE | {"input": "Please give me the value of func_1(-3).", "answer": -7}
    run = f"infinitebench:{write(tmp_path / 'code_run.jsonl', call)}"
    assert ask(run).text.endswith("The value of func_1(-3) is")
    assert tasks.get(run).grade(ask(run), "-7") == 1.0
    calc = f"infinitebench:{write(tmp_path / 'math_calc.jsonl', INFINITE | {'answer': [[1, 4, 8]]})}"
    assert tasks.get(calc).grade(ask(calc), "1, 4, 9") == pytest.approx(2 / 3)


def test_haystack_of_own_texts(tmp_path: Path) -> None:
    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "one.txt").write_text("The first essay begins. It goes on! Does it end?\n" * 3, encoding="utf-8")
    spec = f"niah:{essays}"
    asked = tasks.get(spec).make(300, 0.5, 4, by_word, 1)
    assert 0.98 * 300 <= 1 + len(by_word(asked.text)) <= 300
    start, end = asked.needle[0]
    assert "Dolores Park" in asked.text[start:end]
    assert tasks.get(spec).make(300, 0.5, 4, by_word, 1) == asked
    assert tasks.get(spec).grade(asked, "eat a sandwich in Dolores Park") == pytest.approx(2 / 3)
    (essays / "needle.json").write_text(
        json.dumps({"needle": "The cat is blue.", "question": "What is blue?", "answers": ["cat"]})
    )
    own = tasks._load(tasks.file_kinds()["niah"])(essays)
    assert own.make(200, 0.0, 1, by_word, 1).answer == " cat"
    (essays / "needle.json").write_text(json.dumps({"needle": "The cat is blue."}))
    with pytest.raises(ValueError, match="lacks the field 'question'"):
        tasks._load(tasks.file_kinds()["niah"])(essays)


def test_long_prompts_are_cut_in_their_middle(tmp_path: Path) -> None:
    words = " ".join(f"w{at}" for at in range(500))
    spec = f"ruler:{write(tmp_path / 'vt.jsonl', RULER | {'input': words})}"
    text = ask(spec, 0, 101).text
    assert len(by_word(text)) in (99, 100)
    assert text.startswith("w0 w1 ")
    assert text.endswith(" w498 w499")
    assert cut_middle("short", 10, by_word) == "short"


@pytest.mark.parametrize(
    ("name", "good", "bad", "sentence"),
    [
        (
            "longbench:hotpotqa.jsonl",
            LONGBENCH,
            {"context": None},
            r"line 2 of 'hotpotqa.jsonl': the field 'context' is not a text",
        ),
        ("longbench:hotpotqa.jsonl", LONGBENCH, {"answers": []}, "line 2 .* empty list 'answers'"),
        ("longbench:hotpotqa.jsonl", LONGBENCH, {"dataset": "qasper"}, "mixes the datasets hotpotqa, qasper"),
        ("longbench:trec.jsonl", LONGBENCH, {"dataset": "trec"}, "line 2 .* lacks the field 'all_classes'"),
        ("longbench:x.jsonl", LONGBENCH, {"dataset": "x"}, "line 2 .* which LongBench does not have"),
        ("longbench2:data.jsonl", CHOICES, {"answer": "E"}, "line 2 .* none of A, B, C, D"),
        ("ruler:vt.jsonl", RULER, {"outputs": "7"}, "line 2 .* the field 'outputs' is not a list"),
        ("infinitebench:passkey.jsonl", INFINITE, {"answer": []}, "line 2 .* lacks the field 'answer'"),
        (
            "infinitebench:code_debug.jsonl",
            INFINITE | {"answer": ["a"], "options": ["a", "b", "c", "d"]},
            {"answer": ["z"]},
            "none of its options",
        ),
        ("infinitebench:code_run.jsonl", INFINITE | {"input": "func_1(2)"}, {"input": "?"}, "names no call"),
    ],
)
def test_a_damaged_line_is_one_sentence(
    tmp_path: Path, name: str, good: dict[str, Any], bad: dict[str, Any], sentence: str
) -> None:
    kind, _, file = name.partition(":")
    path = write(tmp_path / file, good, good | bad)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"{kind}:{path}")
    assert path.read_bytes() == before


@pytest.mark.parametrize("field", ["input", "context", "answers", "dataset"])
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    path = write(
        tmp_path / "hotpotqa.jsonl", LONGBENCH, {key: value for key, value in LONGBENCH.items() if key != field}
    )
    with raises_code("field_missing", row=2, field=field):
        tasks.get(f"longbench:{path}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{", "line 1 .* not JSON"), (b"[1]", "not a JSON object"), (b"\n", "no prompts"), (b"\xff", "not UTF-8")],
)
def test_a_file_of_something_else_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "vt.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"ruler:{tmp_path / 'vt.jsonl'}")
    with raises_code("file_missing"):
        tasks.get("ruler:/nowhere/vt.jsonl")


def test_there_is_no_prompt_behind_the_last(tmp_path: Path) -> None:
    with raises_code("no_such_prompt", prompts=1, index=1):
        ask(f"ruler:{write(tmp_path / 'vt.jsonl', RULER)}", 1)
