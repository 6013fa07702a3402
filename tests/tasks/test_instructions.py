"""Instructions that must survive: a prompt names its instruction as a segment, and each instruction is scored by
itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvlens
from kvlens import tasks
from kvlens.lens.instructions import followed_instructions
from kvlens.tasks.base import Encoding, TaskPrompt, ask, prompt_of
from kvlens.tasks.encoding import encoding
from kvlens.tasks.instructions import DOCUMENTS, FIRST, INSTRUCTION, LAST, SEVERAL, followed

TASKS = (FIRST, LAST, SEVERAL)
ENCODING = Encoding(lambda text: list(range(len(text) // 4 + 1)), chat=True)


def prompt_with(task: tasks.Task, seed: int = 1, depth: float = 0.5) -> TaskPrompt:
    return ask(task, 700, depth, seed, ENCODING)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_instruction_and_documents_are_segments_in_the_order_of_the_text(task: tasks.Task) -> None:
    prompt = prompt_with(task)
    parts = {part.name: prompt.text[part.start : part.end] for part in prompt.segments}
    assert set(parts) == {INSTRUCTION, DOCUMENTS}
    names = [part.name for part in prompt.segments]
    assert names == ([DOCUMENTS, INSTRUCTION] if task is LAST else [INSTRUCTION, DOCUMENTS])
    assert all(first.end <= second.start for first, second in pairwise(prompt.segments))
    (start, end), number = prompt.needle[0], prompt.answers[0]
    assert number in prompt.text[start:end]
    assert prompt.text[start:end] in parts[DOCUMENTS]
    assert all(rule.sentence in parts[INSTRUCTION] for rule in task.rules)  # type: ignore[attr-defined]
    assert number not in parts[INSTRUCTION]
    assert prompt.question is not None
    assert prompt.segments[-1].end <= prompt.question
    source = prompt_of(prompt)
    assert (source.segments, source.question) == (prompt.segments, prompt.question)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_expected_answer_scores_one_and_the_plain_number_its_share(task: tasks.Task) -> None:
    prompt = prompt_with(task)
    assert task.score(prompt.answer, f"{prompt.answer}\nQuestion: 7?") == 1.0
    assert task.score(prompt.answer, "") == 0.0
    rules = len(task.rules)  # type: ignore[attr-defined]
    assert task.score(prompt.answer, f" {prompt.answers[0]}") == pytest.approx(1 / (1 + rules))
    assert tasks.is_right(task.name, prompt.answer, prompt.answer)
    assert not tasks.is_right(task.name, prompt.answer, prompt.answers[0])


@pytest.mark.parametrize(
    ("output", "kept"),
    [
        (" [#48213]", {"answer": True, "hash": True, "brackets": True}),
        (" [48213]", {"answer": True, "hash": False, "brackets": True}),
        (" #48213", {"answer": True, "hash": True, "brackets": False}),
        (" [#11111]", {"answer": False, "hash": True, "brackets": True}),
        (" 48213\n[#48213]", {"answer": True, "hash": False, "brackets": False}),
    ],
)
def test_each_instruction_is_scored_by_itself(output: str, kept: dict[str, bool]) -> None:
    assert followed(" [#48213]", output) == kept


def test_a_prompt_is_made_again_from_its_drawing() -> None:
    drawn = {"task": "instructions", "length": 700, "depth": 0.5, "seed": 1, "index": 0}
    assert tasks.remake(drawn, ENCODING) == prompt_with(SEVERAL)
    assert prompt_with(SEVERAL).answer != prompt_with(SEVERAL, seed=2).answer


@pytest.mark.parametrize(
    ("full", "compared"), [(" [#48213]", [True, True, True]), (" 48213", [True, False, False]), (None, [None] * 3)]
)
def test_the_lens_sets_each_instruction_beside_full_kvs_own_run(full: str | None, compared: list[bool | None]) -> None:
    facts = {"task": "instructions", "answer": " [#48213]", "output_text": " [48213]", "reference_output": full}
    facts |= {"method": "snapkv", "forced": None}
    rows = followed_instructions(SimpleNamespace(**facts))  # type: ignore[arg-type]
    assert [row.name for row in rows] == ["answer", "hash", "brackets"]
    assert [row.run for row in rows] == [True, False, True]
    assert [row.full for row in rows] == compared
    assert len({row.sentence for row in rows}) == 3
    assert followed_instructions(SimpleNamespace(**{**facts, "task": "kv_lookup"})) == []  # type: ignore[arg-type]


def test_a_run_of_full_kv_stands_alone_and_a_run_that_was_fed_its_tokens_follows_nothing(tmp_path: Path) -> None:
    """Full KV's own run has no other to be set beside; of forced tokens the method chose none."""
    prompt = prompt_of(ask(SEVERAL, 300, 0.5, 1, encoding("demo")))
    settings: dict[str, Any] = {"model": "demo", "max_new": 4, "runs": tmp_path, "progress": False}
    full = followed_instructions(kvlens.run(prompt, "full", **settings).meta)
    compared = followed_instructions(kvlens.run(prompt, "streaming_llm", "60%", **settings).meta)
    alone = followed_instructions(kvlens.run(prompt, "streaming_llm", "60%", against_full=False, **settings).meta)
    assert [(row.reference, row.full) for row in full] == [(True, None)] * 3
    assert [(row.reference, row.full) for row in compared] == [(False, row.run) for row in full]
    assert [(row.reference, row.full) for row in alone] == [(False, None)] * 3
    assert len({(row.reference, row.sentence) for row in (full[0], compared[0], alone[0])}) == 3
    assert len({row.sentence.count(";") for row in (full[0], alone[0])}) == 2
    forced = kvlens.run(prompt, "streaming_llm", "60%", forced=True, **settings)
    assert forced.meta.output_text is not None
    assert followed_instructions(forced.meta) == []
