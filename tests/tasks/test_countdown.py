"""Long answers: the count's length, the end's rule, and how far a count goes."""

from __future__ import annotations

import pytest
from support import raises_code

from kvlens import tasks
from kvlens.models.find import DEMO
from kvlens.refusal import Refusal
from kvlens.tasks.base import Encoding, TaskPrompt, ask, prompt_of
from kvlens.tasks.countdown import AMONG, COUNTDOWN, FIRST, SHOWN, count_down
from kvlens.tasks.encoding import encoding
from kvlens.tasks.listed import BEGUN

PARTS = Encoding(lambda text: list(range(len(text) // 3 + 1)), chat=True)
COUNT = count_down(FIRST, 1)


def prompt_with(task: tasks.Task, seed: int = 1, length: int = 800, encoded: Encoding = PARTS) -> TaskPrompt:
    return ask(task, length, 0.3, seed, encoded)


@pytest.mark.parametrize("task", [COUNTDOWN, AMONG], ids=lambda task: task.name)
def test_the_fact_is_in_the_text_and_not_in_the_question(task: tasks.Task) -> None:
    prompt = prompt_with(task)
    (number,), ((start, end),) = prompt.answers, prompt.needle
    assert prompt.question is not None
    assert number in prompt.text[start:end]
    assert number not in prompt.text[prompt.question :]
    assert prompt.text.count("library card number") == 8 + (3 if task is AMONG else 0)
    assert all(count_down(number, 1) in prompt.text[: prompt.question] for number in SHOWN), "the examples are whole"
    assert COUNT not in prompt.text
    assert prompt.opening == "99, 98, 97,"
    assert prompt.facts == {"first": FIRST}
    source = prompt_of(prompt)
    assert (source.question, source.answer_prefix, source.task) == (prompt.question, prompt.opening, task.name)


def test_the_answer_of_the_usual_model_has_hundreds_of_tokens_and_room_to_end() -> None:
    for chat in ("on", "off"):
        encoded = encoding("smollm2", chat)
        tokens = len(encoded.encode(COUNT))
        start = len(encoded.encode(count_down(FIRST, FIRST - BEGUN + 1)))
        assert 370 <= tokens - start <= COUNTDOWN.new_tokens - 25


@pytest.mark.parametrize(
    ("output", "right"),
    [
        (f" {COUNT}. The library card number of Ada Hale is 48213.", 1.0),
        (f" {COUNT}. 48213\nQuestion: Count", 1.0),
        (f" {count_down(FIRST - BEGUN, 1)}. It is 48213.", 1.0),
        (f" {count_down(FIRST - BEGUN - 1, 1)}. It is 48213.", 0.0),
        (f" {count_down(FIRST - BEGUN, 80)}, {count_down(8, 1)}. It is 48213.", 0.0),
        (f" {COUNT}.\nThe library card number is 48213.", 0.0),
        (f" {COUNT}. The library card number of Ada Hale is 48214.", 0.0),
        (f" {count_down(96, 89)}. The library card number of Ada Hale is 48213.", 0.0),
        (f" {count_down(14, 11)}. It is 48213.", 0.0),
        (f" {count_down(14, 12)}, 1. It is 48213.", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_right_behind_the_end_of_the_count(output: str, right: float) -> None:
    assert COUNTDOWN.score(" 48213", output) == right
    assert tasks.is_right("countdown_among", " 48213", output) is bool(right)


@pytest.mark.parametrize(
    ("output", "numbers"),
    [
        (f" {COUNT}. The library card number of Ada Hale is 48213.", 99),
        (f", {count_down(89, 87)}. It", 3),
        (f" {count_down(89, 88)}, {count_down(86, 80)}", 2),
        (f" {count_down(89, 88)} and {count_down(87, 80)}", 2),
        (f" {count_down(2, 1)}, 0", 2),
        (" 9", 1),
        ("Ada Hale", 0),
        ("", 0),
    ],
)
def test_a_count_is_right_until_its_first_mistake(output: str, numbers: int) -> None:
    assert COUNTDOWN.counted(output) == numbers


def test_prompts_are_made_again_from_their_drawing_and_differ_by_seed() -> None:
    drawn = {"task": "countdown", "length": 800, "depth": 0.3, "seed": 1, "index": 0}
    assert tasks.remake(drawn, PARTS) == prompt_with(COUNTDOWN)
    assert prompt_with(COUNTDOWN).answer != prompt_with(COUNTDOWN, seed=2).answer


def test_it_is_a_task_of_studies_and_not_of_the_toy() -> None:
    entries = {entry["name"]: entry for entry in tasks.catalogue()}
    for task in (COUNTDOWN, AMONG):
        assert (entries[task.name]["demo_language"], entries[task.name]["new_tokens"]) == (False, 420)
        assert task.name not in tasks.usual(DEMO)
    with raises_code("too_short", Refusal, tokens=64):
        COUNTDOWN.make(64, 0.3, 1, PARTS.encode)
