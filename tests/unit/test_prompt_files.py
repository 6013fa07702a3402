"""Prompt files as people save them: byte order marks, CRLF, integers as answers, and files of many prompts."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvlens.text.promptfiles import decode, read_prompt
from kvlens.text.prompts import BadPrompt, PromptText
from kvlens.text.segments import BadSegment

LINES = b'{"text": "Who?"}\n{"text": "When?"}\n'
WINDOWS = "a\r\n\r\nred\r\nblue\r\nend"


@pytest.mark.parametrize(
    ("name", "data"),
    [("x.jsonl", LINES), ("X.JSONL", LINES), ("x.jsonl.gz", gzip.compress(LINES, mtime=0)), ("x.jsonl", b"")],
)
def test_a_file_of_many_prompts_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(BadPrompt) as refused:
        read_prompt(file)
    assert str(refused.value).startswith(f"{name} ")
    assert ".txt or .json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_name_of_the_file_decides() -> None:
    assert decode(LINES, "x.jsonl.txt").text == LINES.decode()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(4172, "4172"), (-3, "-3"), (0, "0"), ("4172", "4172"), (True, None), (4.5, None), (None, None), ([1], None)],
)
def test_an_integer_is_an_answer(answer: Any, expected: str | None) -> None:
    assert decode(json.dumps({"text": "How many?", "answer": answer}).encode(), "p.json").answer == expected


@pytest.mark.parametrize("name", ["p.txt", "p.md", "standard input"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_text_has_no_mark_and_lf_alone(name: str, mark: bytes) -> None:
    assert decode(mark + "über\r\nzwei\r\n\rdrei\n".encode(), name) == PromptText("über\nzwei\n\rdrei\n")


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_json_has_no_mark_and_its_text_lf_alone(mark: bytes) -> None:
    data = b'{\r\n "text": "a\\r\\nb\\r\\ncd",\r\n "answer": 7\r\n}\r\n'
    assert decode(mark + data, "p.json") == PromptText("a\nb\ncd", answer="7")


@pytest.mark.parametrize(
    "words", ["a", "\r\n", "red", "red\r\nblue", "blue", "\n\r", "end", "a\r\n\r\nred\r\nblue\r\nend"]
)
def test_character_positions_follow_the_text(words: str) -> None:
    text = "a\r\n\r\nred\r\nblue\r\nend"
    start = text.index(words)
    fields = {"text": text, "needle": [[start, start + len(words)]], "question": WINDOWS.index("blue")}
    prompt = decode(json.dumps(fields).encode(), "p.json")
    assert prompt.text == "a\n\nred\nblue\nend"
    (begin, end), *more = prompt.needle
    assert not more
    assert prompt.text[begin:end].strip() == words.replace("\r\n", "\n").strip()
    assert prompt.question is not None
    assert prompt.text[prompt.question :] == "blue\nend"


@pytest.mark.parametrize("field", [{"needle": [[-1, 2]]}, {"needle": [[1, 7]]}, {"question": 6}, {"question": -1}])
def test_positions_outside_the_text_are_refused(field: dict[str, Any]) -> None:
    text = "a\r\nbcd"
    with pytest.raises(BadPrompt):
        decode(json.dumps({"text": text} | field).encode(), "p.json")
    assert decode(json.dumps({"text": text, "needle": [[1, 6]]}).encode(), "p.json").needle == ((1, 5),)


@pytest.mark.parametrize("place", [[1], [None, 3], [0, 5, 9], [0.9, 2.7], [True, 3], 5, None, {"a": 1}])
def test_a_segments_place_is_a_marker_or_two_integers(place: Any) -> None:
    with pytest.raises(BadPrompt):
        decode(json.dumps({"text": "a text", "segments": {"a": place}}).encode(), "p.json")


def test_segments_follow_the_text() -> None:
    start = WINDOWS.index("blue")
    places = {"range": [start, start + 4], "marker": "red\r\nblue"}
    prompt = decode(json.dumps({"text": WINDOWS, "segments": places}).encode(), "p.json")
    named = {part.name: prompt.text[part.start : part.end] for part in prompt.segments}
    assert named == {"range": "blue", "marker": "red\nblue\nend"}


def test_an_empty_marker_names_nothing() -> None:
    with pytest.raises(BadSegment) as refused:
        decode(json.dumps({"text": "a text", "segments": {"a": ""}}).encode(), "p.json")
    assert (refused.value.code, refused.value.values) == ("bad_segment", {"given": "a"})
