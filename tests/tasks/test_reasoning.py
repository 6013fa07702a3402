"""Files of problems with one final answer: GSM8K, MATH-500, AIME 2024, GPQA."""

from __future__ import annotations

import csv
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filetasks import ask, by_word, grade, write, write_parquet
from support import raises_code

from kvlens import tasks
from kvlens.lab.tasks.gsm8k import final
from kvlens.lab.tasks.reasoning import last_boxed
from kvlens.tasks import Encoding, Generation


def sums(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n:,}"} for n in numbers]


AIME = {"problem": "How many days has the spring?", "answer": "073", "id": 1}
MATH = {"problem": "What is half of one?", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1}
CHOICES = {
    "Question": "Which tree, so far as is known, has acorns?",
    "Correct Answer": "the oak",
    "Incorrect Answer 1": "the elm",
    "Incorrect Answer 2": "the fir",
    "Incorrect Answer 3": 'the "ash", or\nashtree',
}


def write_csv(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_gsm8k_takes_its_examples_from_the_other_rows(tmp_path: Path) -> None:
    spec = f"gsm8k:{write(tmp_path / 'test.jsonl', *sums(1, 2, 3, 400))}@shots=2"
    asked = ask(spec, 3)
    assert [f"What is {n} and {n}?" in asked.text for n in (1, 2, 3, 400)] == [True, True, False, True]
    assert asked.text[asked.question :] == "\n\nQuestion: What is 400 and 400?\nAnswer:"
    assert "Answer: 1 + 1 = 2\n#### 2\n\nQuestion: What is 2" in asked.text
    assert (asked.answer, tasks.get(spec).new_tokens) == (" 800", 256)
    assert "#### 800" not in asked.text
    for output, right in {
        "400 + 400 = 800\n#### 800\n\nQuestion: more\n#### 7": 1.0,
        "#### $800.00": 1.0,
        "#### 80": 0.0,
        "It is 800": 0.0,
        "####": 0.0,
        "#### .": 0.0,
    }.items():
        assert grade(spec, output, 3) == tasks.score(spec, " 800", output) == right
    chat = tasks.ask(tasks.get(spec), None, None, 0, Encoding(by_word, 4, chat=True), 3)
    assert chat.text.endswith("\n\nQuestion: What is 400 and 400?")


def test_gsm8k_takes_them_from_the_training_rows_beside_it_the_same_for_all(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *sums(*range(10, 20)))
    spec = f"gsm8k:{write(tmp_path / 'test.jsonl', *sums(1, 2))}"
    first, second = ask(spec), ask(spec, 1)
    assert first.text[: first.question] == second.text[: second.question]
    assert [f"What is {n} and {n}?" in first.text for n in range(10, 20)] == [True] * 8 + [False] * 2
    assert "What is 1 and 1?" in first.text[first.question :]
    none = ask(f"{spec}@shots=0")
    assert "####" not in none.text.partition("\n\n")[2]
    with pytest.raises(ValueError, match=r"'train.jsonl' has 10 worked examples, not 11"):
        tasks.get(f"{spec}@shots=11")
    write(tmp_path / "train.jsonl", *sums(1, 2), {"question": "?", "answer": "none"})
    with raises_code("no_figure", row=3):
        tasks.get(f"{spec}@shots=3")


def test_numbers_behind_the_first_mark() -> None:
    assert [final(text) for text in ("#### -1,234.50", "#### 18.", "no", "#### ,.")] == [-1234.5, 18, None, None]


def test_samples_follow_one_another_with_seeds_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "aime.jsonl", AIME, AIME | {"problem": "And the autumn?", "answer": 204})
    greedy, drawn = tasks.get(f"aime24:{path}"), tasks.get(f"aime24:{path}@samples=3@tokens=100")
    assert (greedy.items, greedy.generation(1)) == (2, Generation(4096))
    assert drawn.items == 6
    assert [drawn.generation(index) for index in (0, 1, 2, 3)] == [
        Generation(100, 0.6, 0.95, seed) for seed in (0, 1, 2, 0)
    ]
    assert [ask(drawn.name, index).answer for index in range(6)] == [" 73"] * 3 + [" 204"] * 3
    assert drawn.metric == f"avg@3 of {greedy.metric}"


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("so \\boxed{73}.", 1.0),
        ("\\boxed{073}", 1.0),
        ("\\boxed{12} or rather \\boxed{ \\text{73} }", 1.0),
        ("\\boxed{73} and no, \\boxed{12}", 0.0),
        ("\\boxed{73", 0.0),
        ("\\boxed{73} and \\boxed{12", 1.0),
        ("\\boxed{\\frac{73}{1}}", 0.0),
        ("73", 0.0),
        ("\\boxed{1073}", 0.0),
        ("", 0.0),
    ],
)
def test_aime_reads_the_last_whole_box(tmp_path: Path, output: str, right: float) -> None:
    spec = f"aime24:{write_parquet(tmp_path / 'aime.parquet', AIME)}"
    assert grade(spec, output) == tasks.score(spec, " 73", output) == right


def test_braces_of_a_box_are_matched() -> None:
    assert last_boxed(r"\boxed{\frac{1}{\sqrt{2}}} and more}") == r"\frac{1}{\sqrt{2}}"
    assert last_boxed(r"\boxed {\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{a \boxed{b}") == "b"
    assert last_boxed(r"\boxed 7") is last_boxed("") is None


def verifier(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for math_verify that is asked and answers; what it was asked."""
    said: list[tuple[Any, ...]] = []
    fake = ModuleType("math_verify")

    def parse(text: str, parsing_timeout: int | None) -> list[str]:
        said.append(("parse", text, parsing_timeout))
        return [text.strip("$")]

    def verify(wanted: list[str], given: list[str], timeout_seconds: int | None) -> bool:
        said.append(("verify", wanted, given, timeout_seconds))
        return wanted[0] in given[0]

    fake.parse, fake.verify = parse, verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    return said


def test_math500_asks_math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = verifier(monkeypatch)
    spec = f"math500:{write(tmp_path / 'test.jsonl', MATH)}@tokens=99"
    output = "It is \\boxed{\\frac{1}{2}}."
    assert grade(spec, output) == 1.0
    assert said == [("parse", "$\\frac{1}{2}$", 5), ("parse", output, 5), ("verify", ["\\frac{1}{2}"], [output], 5)]
    assert grade(spec, "0.5") == 0.0, "what it says holds, though the values are the same"
    assert tasks.get(spec).generation() == Generation(99)
    said.clear()
    other = threading.Thread(target=lambda: grade(spec, output))
    other.start()
    other.join()
    assert said[-1][-1] is None, "signals reach the main thread only"


def test_math500_is_refused_without_math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "test.jsonl", MATH)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with raises_code("package_missing", package="math-verify"):
        tasks.get(f"math500:{path}")
    said = verifier(monkeypatch)
    task = tasks.get(f"math500:{path}")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with raises_code("package_missing", package="math-verify"):
        task.score("\\frac{1}{2}", "\\frac{1}{2}")
    assert not said
    assert not tasks.is_right(f"math500:{path}", "\\frac{1}{2}", "\\frac{1}{2}"), "no comparison of ours instead"


def test_gpqa_shuffles_by_its_seed(tmp_path: Path) -> None:
    spec = f"gpqa:{write_csv(tmp_path / 'gpqa_diamond.csv', *[CHOICES] * 12)}"
    letters = [ask(spec, index).answer.strip() for index in range(12)]
    assert set(letters) == set("ABCD")
    assert letters == [ask(spec, index).answer.strip() for index in range(12)]
    assert letters != [ask(f"{spec}@shuffle=1", index).answer.strip() for index in range(12)]
    for index in range(12):
        asked = ask(spec, index)
        assert f"({letters[index]}) the oak\n" in asked.text
        assert all(f") {CHOICES[name]}\n" in asked.text for name in CHOICES if name != "Question")
    letter = letters[0]
    for output, right in {
        f"The correct answer is ({letter}), I think": 1.0,
        f"(Q) ... Answer: ({letter})": 1.0,
        f"({letter}) it is": 1.0,
        f"I say {letter}": 0.0,
        "the oak": 0.0,
    }.items():
        assert grade(spec, output) == tasks.score(spec, f" {letter}", output) == right
    assert grade(spec, f"({letter}) or not: the answer is ({'A' if letter != 'A' else 'B'})") == 0.0
    samples = tasks.get(f"{spec}@samples=2")
    assert (samples.items, ask(samples.name, 5).text) == (24, ask(spec, 2).text)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "sentence"),
    [
        ("gsm8k", sums(1)[0], {"answer": "2"}, "line 2 of 'file.jsonl' has an answer that does not end with ####"),
        ("gsm8k", sums(1)[0], {"question": " "}, "line 2 .* has an empty field 'question'"),
        ("aime24", AIME, {"answer": 1000}, "line 2 .* has the answer '1000', which is no number from 000 to 999"),
        ("aime24", AIME, {"answer": -1}, "line 2 .* the answer '-1'"),
        ("aime24", AIME, {"answer": True}, "line 2 .* the answer 'True'"),
        ("aime24", AIME, {"problem": ""}, "line 2 .* has an empty field 'problem'"),
        ("aime24", AIME, {"problem": 7}, "line 2 .*: the field 'problem' is not a text"),
        ("math500", MATH, {"level": "1"}, "line 2 .*: the field 'level' is not a number"),
        ("math500", MATH, {"level": True}, "line 2 .*: the field 'level' is not a number"),
        ("math500", MATH, {"answer": " "}, "line 2 .* has an empty field 'answer'"),
    ],
)
def test_a_damaged_line_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, good: dict[str, Any], bad: dict[str, Any], sentence: str
) -> None:
    verifier(monkeypatch)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"{kind}:{write(tmp_path / 'file.jsonl', good, good | bad)}")


def test_a_missing_answer_is_named(tmp_path: Path) -> None:
    with raises_code("field_missing", row=1, field="answer"):
        tasks.get(f"aime24:{write(tmp_path / 'file.jsonl', {'problem': 'What?'})}")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([CHOICES, CHOICES | {"Question": ""}], "row 2 of 'gpqa.csv' has an empty column 'Question'"),
        ([CHOICES | {"Incorrect Answer 1": "the oak "}], "row 1 .* has an answer twice"),
        ([{"Question": "?"}], "row 1 of 'gpqa.csv' lacks the field 'Correct Answer'"),
    ],
)
def test_a_damaged_row_of_gpqa_is_one_sentence(tmp_path: Path, rows: list[dict[str, str]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"gpqa:{write_csv(tmp_path / 'gpqa.csv', *rows)}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'a,b\n"1', "'gpqa.csv' is not CSV"),
        (b"a,b\n1", "row 1 of 'gpqa.csv' has 1 columns, its header 2"),
        (b"", "'gpqa.csv' holds no prompts"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_what_is_no_csv_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "gpqa.csv").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"gpqa:{tmp_path / 'gpqa.csv'}")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("@samples=0", "'samples' lies between 1 and 64, not 0"),
        ("@samples=65", "'samples' lies between 1 and 64, not 65"),
        ("@tokens=0", "'tokens' lies between 1 and 131,072, not 0"),
        ("@samples=two", "the parameter 'samples' of aime24 is a number, not 'two'"),
        ("@shots=2", "files of aime24 have no parameter 'shots'; it has tokens, samples"),
    ],
)
def test_parameters_out_of_range_are_one_sentence(tmp_path: Path, given: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tasks.get(f"aime24:{write(tmp_path / 'aime.jsonl', AIME)}{given}")


def test_too_few_rows_for_the_worked_examples_is_one_sentence(tmp_path: Path) -> None:
    with raises_code("too_few_rows", rows=2, needed=8):
        tasks.get(f"gsm8k:{write(tmp_path / 'test.jsonl', *sums(1, 2))}")
