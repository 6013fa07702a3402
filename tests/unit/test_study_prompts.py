"""The prompts of a study, in every form that a person may have them in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support import raises_code

from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt, prompt_of
from kvlens.studies.taskname import task_settings
from kvlens.tasks.base import Encoding
from kvlens.text.promptfiles import read_prompt
from kvlens.text.prompts import BadPrompt
from kvlens.text.segments import Segment

ROWS = [
    {"id": "door", "context": "The door is red. Its code is 48,213.", "question": "What is the code?", "answer": 48213},
    {"question": "What is the capital of France?", "answers": ["Paris", "Lutetia"], "group": "cities"},
    {"text": "One two three", "needle": "two"},
    {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say yes."}],
        "answer": "yes",
    },
]


def no_tokens() -> Encoding:
    raise AssertionError("files of prompts are read without a tokenizer")


def read(*names: object) -> tuple[tuple[StudyPrompt, ...], tuple[str, ...]]:
    result = read_prompts([str(name) for name in names], no_tokens)
    return result.prompts, result.faults


def check(prompts: tuple[StudyPrompt, ...]) -> None:
    """The prompts are those of ROWS."""
    door, city, text, chat = prompts
    assert (door.id, door.source.answer, door.source.text[door.source.question :].strip()) == (
        "door",
        "48213",
        "What is the code?",
    )
    assert (city.source.answer, city.source.answers, city.group) == ("Paris", ("Lutetia",), "cities")
    assert text.source.needle == ((4, 7),)
    assert (chat.system, chat.source.text, chat.source.answer) == ("Be brief.", "Say yes.", "yes")
    assert len({prompt.id for prompt in prompts}) == 4


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_of_json(tmp_path: Path, end: str, mark: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes((mark + end.join(json.dumps(row) for row in ROWS)).encode())
    prompts, faults = read(path)
    check(prompts)
    assert faults == ()


def test_rows_name_segments_that_a_study_keeps(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        {"text": "Rules: be brief. Ask: what?", "segments": {"rules": "Rules:", "ask": [17, 27]}},
        {"text": "Rules: be brief.", "segments": {"ask": "Ask:"}},
        {"text": "Nothing is named.", "segments": "Rules:"},
        *({"text": f"Row {place}.", "segments": {"row": place}} for place in (5, True, 1.5, None, [1])),
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    (prompt,), faults = read(path)
    assert prompt.source.segments == (Segment("rules", 0, 27), Segment("ask", 17, 27))
    assert prompt_of(prompt.row(), "", "").source == prompt.source
    assert len(faults) == 7
    assert "segment_not_found" in faults[0]
    assert all("bad_segment" in fault for fault in faults[2:])


def test_a_prompt_without_a_named_segment_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("Rules: be brief.", "Be brief.")))
    result = read_prompts([str(path)], no_tokens, [("rules", "Rules:")])
    assert [prompt.source.segments for prompt in result.prompts] == [(Segment("rules", 0, 16),)]
    assert len(result.faults) == 1
    with pytest.raises(BadPrompt):
        read_prompts([str(path)], no_tokens, [("rules", "Nowhere")])


def test_packed_lines_and_a_list(tmp_path: Path) -> None:
    packed, whole = tmp_path / "p.jsonl.gz", tmp_path / "p.json"
    packed.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode()))
    whole.write_text(json.dumps(ROWS))
    check(read(packed)[0])
    check(read(whole)[0])


def test_a_mistaken_line_is_named_and_nothing_else_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [json.dumps(ROWS[0]), "{", '{"question": ""}', '["a"]', '{"text": "a", "needle": "z"}', json.dumps(ROWS[1])]
    path.write_text("\n".join(lines))
    prompts, faults = read(path)
    assert [prompt.id for prompt in prompts] == ["door", "p-6"]
    assert [fault.split(" ")[1].rstrip(":") for fault in faults] == ["2", "3", "4", "5"]
    assert all(fault.startswith("line ") for fault in faults)


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text('question,context,answers,id\n"What, now?","a\nb",x|y,one\nWhat?,,z,\n')
    prompts, _ = read(path)
    assert [(prompt.id, prompt.source.answer, prompt.source.answers) for prompt in prompts] == [
        ("one", "x", ("y",)),
        ("p-4", "z", ()),
    ]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadPrompt):
        read(path)


def test_a_conversation_and_a_text(tmp_path: Path) -> None:
    chat, text = tmp_path / "chat.json", tmp_path / "text.txt"
    chat.write_text(json.dumps(ROWS[3]["messages"]))
    text.write_text("Some words here.")
    other = tmp_path / "more"
    other.mkdir()
    (other / "text.txt").write_text("Other words.")
    prompts, faults = read(chat, text, text, other / "text.txt")
    assert [prompt.id for prompt in prompts] == ["chat", "text", "text#2"]
    assert len(faults) == 1  # the same prompt once more
    assert prompts[0].system == "Be brief."


@pytest.mark.parametrize("name", ["nowhere.jsonl", "no_task", "no_task@length=abc"])
def test_a_name_that_stands_for_nothing_is_refused(name: str) -> None:
    with pytest.raises(BadPrompt):
        read(name)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ("deep=3", "deep"),
        ("length=abc", "length"),
        ("length=", "length"),
        ("length", "length"),
        ("length=0", "length"),
        ("length=1048577", "length"),
        ("prompts=x", "prompts"),
        ("prompts=0", "prompts"),
        ("prompts=10001", "prompts"),
        ("depth=0.5", "depth"),
        ("depth=101", "depth"),
        ("seed=-1", "seed"),
        (f"seed={2**63}", "seed"),
        ("length=300@length=400", "length"),
    ],
)
def test_a_setting_without_a_number_in_its_range_is_refused_by_its_name(settings: str, setting: str) -> None:
    with raises_code("bad_setting", BadPrompt, setting=setting):
        read(f"niah_single@{settings}")


def test_the_settings_of_a_task_are_numbers_and_the_others_as_usual() -> None:
    usual = {"length": 1024, "prompts": 20, "seed": 0, "depth": None}
    assert task_settings("needle") == ("needle", usual)
    assert task_settings("needle@depth=30@length=1048576") == ("needle", usual | {"depth": 30, "length": 1_048_576})
    assert task_settings("nothing@depth=30") is None


def test_a_folder_is_no_file_of_prompts(tmp_path: Path) -> None:
    with raises_code("prompt_is_folder", BadPrompt, folder=str(tmp_path)):
        read(tmp_path)
    with raises_code("prompt_is_folder", BadPrompt, folder=str(tmp_path)):
        read_prompt(tmp_path)


def test_generated_tasks_have_the_size_that_was_asked_for() -> None:
    from kvlens.tasks.encoding import encoding

    result = read_prompts(["needle@length=256@prompts=4@seed=7"], lambda: encoding("demo"))
    assert len({prompt.source.text for prompt in result.prompts}) == 4
    assert {prompt.group for prompt in result.prompts} == {"needle"}


def test_a_stored_prompt_is_the_same() -> None:
    for number, row in enumerate(ROWS):
        prompt = prompt_of(row, str(number), "row")
        assert prompt_of(json.loads(json.dumps(prompt.row())), "other", "row") == prompt
