"""Lists of months before a fact: their length, the end's rule, and how far a list goes."""

from __future__ import annotations

import pytest

from kvlens import tasks
from kvlens.models.find import DEMO
from kvlens.tasks.base import Encoding, ask, prompt_of
from kvlens.tasks.encoding import encoding
from kvlens.tasks.listed import BEGUN
from kvlens.tasks.months import MONTHS

PARTS = Encoding(lambda text: list(range(len(text) // 3 + 1)), chat=True)
ENTRIES = MONTHS.entries(MONTHS.start)
LIST, REST = ", ".join(ENTRIES), ", ".join(ENTRIES[BEGUN:])


def test_a_list_ends_with_the_january_after_whole_years() -> None:
    assert (len(ENTRIES), ENTRIES[0], ENTRIES[11], ENTRIES[12]) == (85, "January 1982", "December 1982", "January 1983")
    assert (ENTRIES[-2], ENTRIES[-1]) == ("December 1988", "January 1989")
    assert sum("9" in entry.replace("19", "", 1) for entry in ENTRIES) == 1, "the last digit is the last year's alone"


def test_the_fact_is_in_the_text_and_not_in_the_question() -> None:
    prompt = ask(MONTHS, 1600, 0.3, 1, PARTS)
    (number,), ((start, end),) = prompt.answers, prompt.needle
    assert prompt.question is not None
    assert number in prompt.text[start:end]
    assert number not in prompt.text[prompt.question :]
    assert prompt.text.count("library card number") == 8
    assert all(", ".join(MONTHS.entries(year)) in prompt.text[: prompt.question] for year in MONTHS.shown)
    assert LIST not in prompt.text
    assert prompt.opening == "January 1982, February 1982, March 1982,"
    source = prompt_of(prompt)
    assert (source.question, source.answer_prefix, source.task) == (prompt.question, prompt.opening, "months")


def test_the_answer_of_the_usual_model_has_more_than_512_tokens_and_room_to_end() -> None:
    tokens = len(encoding("smollm2", "off").encode(REST))
    assert 560 <= tokens <= MONTHS.new_tokens - 25


@pytest.mark.parametrize(
    ("output", "right"),
    [
        (f" {REST}. The library card number of Ada Hale is 48213.", 1.0),
        (f", {REST}. 48213\nQuestion: List", 1.0),
        (f" {REST}, February 1989. 48213", 1.0),
        (f" {LIST}. It is 48213.", 0.0),
        (f" {REST}.\nThe library card number is 48213.", 0.0),
        (f" {REST}. The library card number of Ada Hale is 48214.", 0.0),
        (f" {', '.join(ENTRIES[BEGUN:-1])}. It is 48213.", 0.0),
        (f" {', '.join(ENTRIES[BEGUN:40])}, January 1989. It is 48213.", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_right_behind_the_end_of_the_list(output: str, right: float) -> None:
    assert MONTHS.score(" 48213", output) == right
    assert tasks.is_right("months", " 48213", output) is bool(right)


@pytest.mark.parametrize(
    ("output", "entries"),
    [
        (f" {REST}. The library card number", 82),
        (f" {REST}", 82),
        (f" {REST}0", 81),
        (f" {REST[:-1]}", 81),
        (f" {', '.join(ENTRIES[BEGUN:10])}, {', '.join(ENTRIES[11:])}", 7),
        (f" {', '.join(ENTRIES[BEGUN:10])}.", 6),
        ("Ada Hale", 0),
        ("", 0),
    ],
)
def test_a_list_is_right_until_its_first_mistake(output: str, entries: int) -> None:
    assert MONTHS.counted(output) == entries


def test_prompts_are_made_again_from_their_drawing_and_it_is_no_task_of_the_toy() -> None:
    drawn = {"task": "months", "length": 1600, "depth": 0.3, "seed": 1, "index": 0}
    assert tasks.remake(drawn, PARTS) == ask(MONTHS, 1600, 0.3, 1, PARTS)
    entry = next(entry for entry in tasks.catalogue() if entry["name"] == "months")
    assert (entry["demo_language"], entry["new_tokens"]) == (False, 620)
    assert "months" not in tasks.usual(DEMO)
